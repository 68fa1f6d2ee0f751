"""Pipeline parallelism (Cronus, section 3.3): one instance whose layers lie on several groups."""

from jaxinfer.systems.single import Single


class PipelineParallel(Single):
    """Routes as ``Single`` does: the stages are the instance's, and so is the chunked prefill."""
