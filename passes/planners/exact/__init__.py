"""The exact planner: a 0-1 program over retention, refined where its answer breaks the budget."""
