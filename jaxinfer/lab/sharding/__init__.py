"""Studies layouts: candidates priced by closed forms and checked by compilers."""
