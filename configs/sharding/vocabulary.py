"""The embedding's vocabulary shared out too, all else as built in: for ``engine.layout``."""

from jaxinfer.models.layouts import ALL, LAYOUTS, Rule

RULES = (Rule("embed_VD", {"V": ALL}), *LAYOUTS["megatron"].parameters)
