from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyOptree(PythonPackage):
    """Trees of containers: a later release than the builtin repository has."""

    pypi = "optree/optree-0.20.0.tar.gz"

    license("Apache-2.0")

    version("0.20.0", sha256="c7403eb0f2b2a060a97803a8f52904212df85ed6cff4b0eeed9cc6e38c2cf88d")

    depends_on("cxx", type="build")
    depends_on("cmake@3.18:", type="build")
    depends_on("py-setuptools", type="build")
    depends_on("py-pybind11@3:", type=("build", "link"))
    depends_on("python@3.9:", type=("build", "link", "run"))
    depends_on("py-typing-extensions@4.12:", type=("build", "run"))
