"""Workers in separate processes, on this host or on others."""
