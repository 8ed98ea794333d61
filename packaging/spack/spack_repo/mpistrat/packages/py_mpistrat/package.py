from pathlib import Path

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpistrat(PythonPackage):
    """One Python program on many processes: the API of tf.distribute on MPI, without TensorFlow."""

    git = Path(__file__).parents[6].as_uri()  # the clone that this file is in

    license("BSD-3-Clause")

    version("main", branch="main")

    variant("plot", default=False, description="Curves of training, by matplotlib")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@68:", type="build")

    with default_args(type=("build", "run")):
        depends_on("py-mpi4py@4.1:")
        depends_on("py-numpy@1.26:")
        depends_on("py-h5py@3.10:")
        depends_on("py-optree@0.13:")
        depends_on("py-xxhash@3.0:")
        depends_on("py-cloudpickle@3.0:")
        depends_on("py-lazy-loader@0.6:")
        depends_on("py-threadpoolctl@3.0:")
        depends_on("py-array-api-compat@1.9:")
        depends_on("py-click@8.2:")
        depends_on("py-rich@13:")
        depends_on("py-tqdm@4.60:")
        depends_on("py-tomli@2.0:", when="^python@:3.10")
        depends_on("py-matplotlib@3.7:", when="+plot")
