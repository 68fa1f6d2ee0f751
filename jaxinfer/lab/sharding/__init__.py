"""Studies layouts: closed forms price the candidates, and compilers check them."""
