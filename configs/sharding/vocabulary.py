"""The embedding's vocabulary shared out too, all else as built in: for ``engine.sharding``."""

from jaxinfer.models.sharding import HEADS_AXIS, RULES, Rule

RULES = (Rule("embed_VD", {"V": HEADS_AXIS}), *RULES)
