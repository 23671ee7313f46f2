"""The XLA side: read scheduled modules, predict their heap, plan their kernels, write the plan back."""
