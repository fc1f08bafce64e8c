"""Makes the threads of PyTorch's kernels sleep while they wait for each other, unless the user chose otherwise.

By default the threads of libgomp, which comes with PyTorch's wheels, spin until there is work again. If other programs
need the cores too, spinning threads block the very threads that they wait for, and a run with as many threads as cores
drops to two thirds of its speed or less. Sleeping costs a tenth on an idle machine. The results are bit-identical.
"""

from collections.abc import MutableMapping

_POLICY = "OMP_WAIT_POLICY"
_WAITING = (_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # two of libgomp, one of Intel's OpenMP


def wait_quietly(environ: MutableMapping[str, str]) -> None:
    """Sets the environment variable for this process and its children, unless the user has set one of them.

    libgomp reads it when torch is imported: call this before.
    """
    if not any(environ.get(name) for name in _WAITING):
        environ[_POLICY] = "PASSIVE"
