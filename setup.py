"""The top-level folder kernels/ is installed as parallel_sgd.kernels.

The link parallel_sgd/kernels -> ../kernels makes the same import work in a bare checkout and in
an editable install; a wheel needs the mapping below.
"""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["parallel_sgd", "parallel_sgd.*"]),
    package_dir={"parallel_sgd.kernels": "kernels"},
    package_data={"parallel_sgd": ["py.typed"], "parallel_sgd.kernels.cuda": ["*.cu", "*.h"]},
)
