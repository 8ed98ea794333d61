from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyArrayApiCompat(PythonPackage):
    """Arrays of several libraries by one API, which the builtin repository does not have."""

    git = "https://github.com/data-apis/array-api-compat.git"

    license("MIT")

    version("1.16.0", tag="1.16.0")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools", type="build")
    depends_on("py-setuptools-scm", type="build")
