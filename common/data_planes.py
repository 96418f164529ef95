"""The ways of KV from one node to the other, by name.

Decides which of them two nodes agree on; used by the configuration and by the prefill core at HELLO. It must
never guess from an address whether two nodes share memory: that is proved, see `transport.slab`.
"""

SHM = "shm"
TCP = "tcp"
AUTO = "auto"
KV_PLANES = (AUTO, SHM, TCP)


def planes_of(kv_plane: str) -> tuple[str, ...]:
    """What `--kv-plane` stands for: the data planes that a node can use."""
    return (SHM, TCP) if kv_plane == AUTO else (kv_plane,)


def common_planes(ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[str, ...]:
    """Data planes that both can use, in our order."""
    return tuple(plane for plane in ours if plane in theirs)
