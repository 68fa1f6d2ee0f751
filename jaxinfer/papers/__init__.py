"""Rooms of papers: each has its system, its planner if it has one, and their parts."""
