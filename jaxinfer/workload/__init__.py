"""What goes in and comes out: batch files, bench workloads, traces."""
