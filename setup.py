"""The top-level folder kernels/ is installed as parallel_sgd.kernels.

The link parallel_sgd/kernels -> ../kernels makes the same import work in a bare checkout and in
an editable install; a wheel needs the mapping below.
"""

from setuptools import setup

setup(
    packages=[
        "parallel_sgd",
        "parallel_sgd.algorithms",
        "parallel_sgd.command_line",
        "parallel_sgd.communication",
        "parallel_sgd.compression",
        "parallel_sgd.data",
        "parallel_sgd.exchange",
        "parallel_sgd.kernels",
        "parallel_sgd.kernels.cuda",
        "parallel_sgd.models",
        "parallel_sgd.training",
    ],
    package_dir={"parallel_sgd.kernels": "kernels"},
    package_data={"parallel_sgd": ["py.typed"], "parallel_sgd.kernels.cuda": ["*.cu", "*.h"]},
)
