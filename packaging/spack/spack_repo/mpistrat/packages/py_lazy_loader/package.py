from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyLazyLoader(PythonPackage):
    """Submodules and names that load when they are first used: a later release than the builtin repository has."""

    pypi = "lazy_loader/lazy_loader-0.6.tar.gz"

    license("BSD-3-Clause")

    version("0.6", sha256="2f4b7824d6401958639008a0cae20c776b61dff619accd6890693e2de8260167")

    depends_on("python@3.9:", type=("build", "run"))
    depends_on("py-setuptools@61.2:", type="build")
    depends_on("py-packaging", type=("build", "run"))
