"""What torch calls at the end of `import torch`, which fails with whatever is raised here.

So nothing is imported before it can be said what is wrong: the package may have been removed by hand, lack
what it needs, or be hidden by a file of its name in the folder where a script runs.
"""

from __future__ import annotations

import warnings


def register() -> None:
    """Make the name "synth" known to `torch.distributed`, or warn why it is not."""
    try:
        from arborcast.torch_backend import register as make_known

        make_known()
    except Exception as error:
        warnings.warn(
            f'arborcast gives torch no process group "synth", as its package cannot be imported: '
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
