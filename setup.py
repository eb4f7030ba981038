"""The top-level folder kernels/ is installed as parallel_sgd.kernels.

The link parallel_sgd/kernels -> ../kernels makes the same import work in a bare checkout and in
an editable install; a wheel needs the mapping below. A source distribution has no link, so the
kernels' packages are listed by their folder.
"""

from setuptools import find_packages, setup

KERNELS = "parallel_sgd.kernels"

setup(
    packages=[
        *find_packages(include=["parallel_sgd", "parallel_sgd.*"], exclude=[f"{KERNELS}*"]),
        *[KERNELS, *(f"{KERNELS}.{name}" for name in find_packages("kernels"))],
    ],
    package_dir={KERNELS: "kernels"},
    package_data={"parallel_sgd": ["py.typed"], f"{KERNELS}.cuda": ["*.cu", "*.h"]},
)
