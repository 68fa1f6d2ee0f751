"""The study of layouts: all candidates by closed forms and by compilers."""
