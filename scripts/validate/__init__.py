"""The simulator beside other simulators and engines, on their measurements."""
