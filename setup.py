"""The library in C that comes with the package; all else about it stands in pyproject.toml.

Here, because setuptools calls its table for such modules in pyproject.toml experimental.
"""

from setuptools import Extension, setup

FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-Wall", "-Wextra"]

setup(
    ext_modules=[
        Extension(
            # No module of Python: `arborcast.backends.native.library` loads it from beside its own file.
            "arborcast.backends.native.built",
            sources=[f"backends/native/{name}.c" for name in ("arithmetic", "channel", "loop", "shelf")],
            depends=["backends/native/native.h"],
            # Synthesis needs none of it: where there is no C compiler, the group says so when it is made.
            optional=True,
            extra_compile_args=FLAGS,
        )
    ]
)
