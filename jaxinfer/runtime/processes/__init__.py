"""Workers in processes of their own, here or on other hosts."""
