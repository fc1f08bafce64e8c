"""How the threads of PyTorch's kernels wait for each other: asleep, unless the user says otherwise.

By default the threads of libgomp, which PyTorch's wheels bring, spin until there is work again. Where other programs
want the cores as well, they keep them from the very threads that they wait for, and a run with as many threads as cores
falls to two thirds of its speed or less. Asleep they cost a tenth on an idle machine. The results are the same bits.
"""

from collections.abc import MutableMapping

_POLICY = "OMP_WAIT_POLICY"
_WAITING = (_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # libgomp's two, and that of builds with Intel's OpenMP


def wait_quietly(environ: MutableMapping[str, str]) -> None:
    """Puts it into the environment, for this process and its children; a user's own setting stays.

    libgomp reads it when it is loaded, with torch: call this before.
    """
    if not any(environ.get(name) for name in _WAITING):
        environ[_POLICY] = "PASSIVE"
