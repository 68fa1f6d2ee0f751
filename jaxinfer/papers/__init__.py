"""Papers: each folder has a paper's system, its planner if it has one, and their parts."""
