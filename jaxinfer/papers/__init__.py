"""Papers: each folder has a paper's system, its planner if there is one, and their parts."""
