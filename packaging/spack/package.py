"""A recipe for Spack. mlfab-0.1.0.tar.gz, which tools/release.sh writes, must be in the folder in which spack is called."""
import os

from spack.package import *


class Mlfab(MakefilePackage):
    """Communication layer of a distributed trainer: parameter servers and collectives, as a C11 library."""

    url = "file://{0}/mlfab-0.1.0.tar.gz".format(os.getcwd())
    manual_download = True
    license("MIT")

    version("0.1.0")

    variant("extras", default=True, description="TLS, other traffic and stores: OpenSSL and libcurl")
    variant("mpi", default=False, description="libmlfab_mpi.so, for collectives of MPI programs")

    depends_on("c", type="build")
    depends_on("gmake", type="build")
    depends_on("python@3.9:", type=("build", "run"))
    depends_on("pkgconfig", type="build", when="+extras")
    depends_on("openssl@1.1.1:", when="+extras")
    depends_on("curl@7.68:", when="+extras")
    depends_on("mpi", when="+mpi")

    def found(self):
        """The words of tests/found.sh: what make builds does not depend on other programs of the machine."""
        words = ["python3"]
        if self.spec.satisfies("+extras"):
            words += ["tls", "curl"]
        if self.spec.satisfies("+mpi"):
            words.append("mpi:default")
        return "FOUND=" + " ".join(words)

    def build(self, spec, prefix):
        make("libraries", "tools", "extras", self.found())

    def install(self, spec, prefix):
        make("install", "PREFIX=" + prefix, self.found())

    @run_after("install")
    def check_version(self):
        Executable(join_path(self.prefix.bin, "mlfab-run"))("--version")
