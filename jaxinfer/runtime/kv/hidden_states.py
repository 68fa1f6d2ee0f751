"""Sends hidden states from the stages in one process to those in the next."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.kv.sockets import Address
from jaxinfer.runtime.kv.transports import TcpTransport


class HiddenForm(NamedTuple):
    """The shape and dtype of a message: hidden states [T, D]."""

    shape: tuple[int, ...]
    dtype: jnp.dtype


class HiddenStates:
    """One process's ends of a pipeline: takes hidden states from earlier stages, gives its own on.

    A step's number, the same in all processes, identifies its hidden states. A fetch may begin
    before the hidden states are offered, and then waits for them.

    Args:
        host: address of this process.

    Attributes:
        address: address from which the process with the later stages fetches.
        before: address of the process with the earlier stages; None until it is known, and for the
            first process.
    """

    def __init__(self, host: str) -> None:
        self._transport = TcpTransport(host, waits=True)
        self.address = self._transport.address
        self.before: Address | None = None

    def give(self, step: int, x_TD: jax.Array) -> None:
        """Wait for a step's hidden states, then offer them."""
        # One device's copy; every device has all of it.
        one = x_TD.addressable_shards[0].data
        self._transport.offer(step, one, HiddenForm(one.shape, one.dtype))

    def take(self, step: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Wait for a step's hidden states from the previous process; shard them as ``like``.

        Raises:
            OSError, EOFError: the previous process can no longer be reached.
        """
        assert self.before
        assert like.sharding
        form = HiddenForm(like.shape, like.dtype)
        try:
            found = self._transport.fetch(step, self.before, form, like.sharding, None)
        except JaxinferError as error:  # It closes, so nothing more will be offered.
            raise EOFError(str(error)) from None
        return jax.device_put(found, like.sharding)

    def forget(self) -> None:
        """Drop the hidden states that were offered and will not be taken."""
        self._transport.drop_all()
