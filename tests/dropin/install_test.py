#!/usr/bin/env python3
# lane: check
# limit: 900
"""Installing mlfab, and using it from other projects: make install and uninstall, pkg-config, and
CMake in its three ways, with which optimization; which MPI libraries make finds; and the words and numbers
that it and the tests refuse. Everything happens in temporary folders, and nothing needs a network."""
import atexit
import functools
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "process"))
from process import BUILD, Skip, clean_environment, expect, main, run  # noqa: E402

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))

HEADERS = sorted(name for name in os.listdir(ROOT) if name.endswith(".h"))

PROJECT = """\
cmake_minimum_required(VERSION 3.11)
project(trainer C)
%s
add_executable(trainer %s/tests/dropin/trainer.c)
target_link_libraries(trainer PRIVATE mlfab::mlfab)
"""


def environment(**more):
    """Without the make that runs this test: its flags are not ours."""
    base = clean_environment(**more)
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
        base.pop(name, None)
    return base


def do(*command, timeout=200, **more):
    result = run(*command, timeout=timeout, env=environment(**more.pop("env", {})), **more)
    expect(result.code == 0, " ".join(str(c) for c in command), result)
    return result


def need(program):
    if not shutil.which(program):
        raise Skip("%s is not installed" % program)


def make(*arguments):
    return do("make", "-C", ROOT, "--no-print-directory", "BUILD=" + BUILD, *arguments)


@functools.cache
def installed():
    """The prefix of one installation for several cases, which do not change it. test_make_install_and_uninstall checks its files."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    make("install", "PREFIX=" + folder)
    return folder


def test_make_install_and_uninstall():
    with tempfile.TemporaryDirectory() as folder:
        make("install", "PREFIX=/opt/mlfab", "DESTDIR=" + folder)
        prefix = folder + "/opt/mlfab"
        for name in (*["include/" + header for header in HEADERS], "lib/libmlfab.a",
                     "lib/libmlfab.so", "bin/mlfab-run", "bin/mlfab-top",
                     *["share/man/man1/mlfab-%s.1" % tool for tool in ("run", "plan", "sim", "top", "fetch")],
                     *["share/bash-completion/completions/mlfab-%s" % tool for tool in ("run", "plan", "sim", "top", "fetch")],
                     "lib/pkgconfig/mlfab.pc", "lib/cmake/mlfab/mlfabConfig.cmake",
                     "lib/cmake/mlfab/mlfabConfigVersion.cmake"):
            expect(os.path.exists(os.path.join(prefix, name)), name)
        for name in ("mlfab_tls", "mlfab_curl", "mlfab_store"):  # what was built of the extras
            if os.path.exists(os.path.join(BUILD, "lib%s.a" % name)):
                expect(os.path.exists("%s/include/%s.h" % (prefix, name)), name)
                expect(os.path.exists("%s/lib/lib%s.a" % (prefix, name)), name)
        found = re.search(r"^  MPI +(.*)$", make("help").out, re.M).group(1).split()
        for mpi in found if found != ["-"] else ():
            for name in ("lib/libmlfab_mpi.so", "lib/mlfab/%s/libmlfab_mpi.so" % mpi):
                expect(os.path.exists(os.path.join(prefix, name)), name)
        with open(prefix + "/lib/pkgconfig/mlfab.pc", encoding="ascii") as file:
            text = file.read()
        expect(folder not in text and "prefix=/opt/mlfab\n" in text and "@" not in text, text)
        version = do(prefix + "/bin/mlfab-fetch", "--version").out.split()[1]
        expect(version in do(prefix + "/bin/mlfab-run", "--version").out, "the version of mlfab-fetch", version)
        make("uninstall", "PREFIX=/opt/mlfab", "DESTDIR=" + folder)
        left = [os.path.join(f, n) for f, _, names in os.walk(folder) for n in names]
        expect(not left, "nothing is left", left)


def test_pkg_config():
    need("pkg-config")
    with tempfile.TemporaryDirectory() as folder:
        env = {"PKG_CONFIG_PATH": installed() + "/lib/pkgconfig", "LD_LIBRARY_PATH": installed() + "/lib"}
        source = ROOT + "/tests/dropin/trainer.c"
        flags = do("pkg-config", "--cflags", "--libs", "mlfab", env=env).out.split()
        do("cc", "-o", folder + "/shared", source, *flags)
        do(folder + "/shared", env=env)
        flags = do("pkg-config", "--static", "--cflags", "--libs", "mlfab", env=env).out.split()
        do("cc", "-o", folder + "/static", source, "-Wl,-Bstatic",
           *[f if f != "-lpthread" else "-Wl,-Bdynamic" for f in flags], "-lpthread")
        do(folder + "/static")


def test_pkg_config_of_the_extras():
    """A program that calls an extra links with the flags of its file alone, and starts."""
    need("pkg-config")
    built = [name for name in ("tls", "curl", "store") if os.path.exists(os.path.join(BUILD, "libmlfab_%s.a" % name))]
    if not built:
        raise Skip("no extra is built: OpenSSL and libcurl are missing")
    calls = {"tls": "return !mlfab_transport_tls()", "curl": "mlfab_curl_push *p = 0; mlfab_curl_push_stop(&p)",
             "store": "mlfab_store *s = 0; mlfab_store_close(&s)"}
    with tempfile.TemporaryDirectory() as folder:
        env = {"PKG_CONFIG_PATH": installed() + "/lib/pkgconfig", "LD_LIBRARY_PATH": installed() + "/lib"}
        for name in built:
            source = "%s/%s.c" % (folder, name)
            with open(source, "w", encoding="ascii") as file:
                file.write('#include "mlfab_%s.h"\nint main(void) { %s; }\n' % (name, calls[name]))
            flags = do("pkg-config", "--cflags", "--libs", "mlfab_" + name, env=env).out.split()
            do("cc", "-o", folder + "/" + name, source, *flags)
            do(folder + "/" + name, env=env)


def launcher(folder):
    """A compiler launcher for CMake, which takes the objects that make has built of mlfab.c and mlfab_sim.c and compiles all
    else: whether CMake compiles these is seen once, by test_cmake_find_package_after_cmake_install."""
    path = folder + "/launcher"
    with open(path, "w", encoding="ascii") as file:
        file.write('#!/bin/sh\nbefore=\nfor word; do\n  case $before$word in\n    -o*mlfab.c.o) exec cp "%s/mlfab.o" "$word" ;;\n'
                   '    -o*mlfab_sim.c.o) exec cp "%s/mlfab_sim.o" "$word" ;;\n  esac\n  before=$word\ndone\nexec "$@"\n' % (BUILD, BUILD))
    os.chmod(path, 0o755)
    return "-DCMAKE_C_COMPILER_LAUNCHER=" + path


@functools.cache
def compiler_of_cmake():
    """The folder with CMake's knowledge of the compiler. A project without files makes it."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    with open(folder + "/CMakeLists.txt", "w", encoding="ascii") as file:
        file.write("cmake_minimum_required(VERSION 3.11)\nproject(trainer C)\n")
    do("cmake", "-S", folder, "-B", folder + "/build")
    found = glob.glob(folder + "/build/CMakeFiles/*/CMakeCCompiler.cmake")
    expect(len(found) == 1, "what CMake knows of the compiler", found)
    return os.path.dirname(found[0])


def configure(source, build, *options, **more):
    """Configures. CMake takes from compiler_of_cmake() which compiler is here, and tests neither it nor its threads. fresh: it
    tests all, as a user's does."""
    if not more.pop("fresh", False):
        known = compiler_of_cmake()
        shutil.copytree(known, "%s/CMakeFiles/%s" % (build, os.path.basename(known)))
        options += ("-DCMAKE_HAVE_LIBC_PTHREAD=1",)
    return run("cmake", "-S", source, "-B", build, *options, timeout=200, env=environment(**more))


def configured(*arguments, **more):
    result = configure(*arguments, **more)
    expect(result.code == 0, " ".join(arguments), result)


def build_and_run(folder, text, *options):
    """A project with this text, configured, built and run."""
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/CMakeLists.txt", "w", encoding="ascii") as file:
        file.write(PROJECT % (text, ROOT))
    configured(folder, folder + "/build", "-DCMAKE_BUILD_TYPE=Debug", *options)
    do("cmake", "--build", folder + "/build")
    do(folder + "/build/trainer")
    with open(folder + "/build/trainer", "rb") as file:
        return b"libmlfab.so" in file.read()


def test_cmake_add_subdirectory():
    need("cmake")
    text = "add_subdirectory(%s mlfab)" % ROOT
    with tempfile.TemporaryDirectory() as folder:
        built = launcher(folder)
        expect(not build_and_run(folder + "/a", text, built), "static by default")
        expect(build_and_run(folder + "/b", text, built, "-DBUILD_SHARED_LIBS=ON"), "shared when asked for")


def test_cmake_FetchContent():
    need("cmake")
    # A folder stands for the download.
    text = ("include(FetchContent)\n"
            "FetchContent_Declare(mlfab URL file://@/mlfab.tar.gz)\n"
            "FetchContent_GetProperties(mlfab)\n"
            "if(NOT mlfab_POPULATED)\n  FetchContent_Populate(mlfab)\n"
            "  add_subdirectory(${mlfab_SOURCE_DIR} ${mlfab_BINARY_DIR})\nendif()\n")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.check_call(["tar", "-C", ROOT, "-czf", folder + "/mlfab.tar.gz", "mlfab.c",
                               *HEADERS, "amalgamate.py", "core", "transports", "LICENSE", "CMakeLists.txt", "cmake", "mlfab.pc.in"])
        text = text.replace("@", folder)
        build_and_run(folder + "/populate", text, launcher(folder))
        build_and_run(folder + "/available", "include(FetchContent)\n"
                      "FetchContent_Declare(mlfab URL file://%s/mlfab.tar.gz)\n"
                      "FetchContent_MakeAvailable(mlfab)\n" % folder, launcher(folder))


def test_cmake_find_package_after_make_install():
    need("cmake")
    with tempfile.TemporaryDirectory() as folder:
        where = "-DCMAKE_PREFIX_PATH=" + installed()
        text = "find_package(mlfab 0.1 REQUIRED)"
        expect(not build_and_run(folder + "/a", text, where), "static by default")
        expect(build_and_run(folder + "/b", text, where, "-DBUILD_SHARED_LIBS=ON"), "shared if asked")


def test_cmake_find_package_after_cmake_install():
    """Each component of the install has its files, and all of them together are a whole one."""
    need("cmake")
    with tempfile.TemporaryDirectory() as folder:
        clang = ["-DCMAKE_C_COMPILER=clang"] if shutil.which("clang") else []  # a third of gcc's time
        configured(ROOT, folder + "/m", "-DCMAKE_INSTALL_PREFIX=" + folder + "/prefix", *clang, CFLAGS="-O0", fresh=True)
        do("cmake", "--build", folder + "/m", timeout=600)  # three tools, and mlfab.c
        for component, has, lacks in (("tools", "bin/mlfab-run bin/mlfab-sim bin/mlfab-top bin/mlfab-fetch", "include lib"),
                                      ("runtime", "", "include lib/libmlfab.a"),  # of a static library it is empty
                                      ("development", "include/mlfab.h lib/libmlfab.a lib/cmake/mlfab/mlfabConfig.cmake", "")):
            do("cmake", "-DCOMPONENT=" + component, "-P", folder + "/m/cmake_install.cmake")
            expect(all(os.path.exists(folder + "/prefix/" + name) for name in has.split()), "%s has %s" % (component, has))
            expect(not any(os.path.exists(folder + "/prefix/" + name) for name in lacks.split()), "%s lacks %s" % (component, lacks))
        version = do(folder + "/prefix/bin/mlfab-fetch", "--version").out.split()[1]
        expect(version in do(folder + "/prefix/bin/mlfab-run", "--version").out, "the version of mlfab-fetch", version)
        build_and_run(folder + "/a", "find_package(mlfab REQUIRED COMPONENTS tools)\n"
                      "get_target_property(run mlfab::mlfab-run LOCATION)\nexecute_process(COMMAND ${run} --version RESULT_VARIABLE code)\n"
                      'if(NOT code STREQUAL "0")\n  message(FATAL_ERROR "mlfab-run")\nendif()', "-DCMAKE_PREFIX_PATH=" + folder + "/prefix")
        configured(ROOT, folder + "/s", "-DCMAKE_BUILD_TYPE=Debug", "-DBUILD_SHARED_LIBS=ON",
                   "-DCMAKE_INSTALL_PREFIX=" + folder + "/shared", launcher(folder))
        do("cmake", "--build", folder + "/s", timeout=600)
        for component in ("tools", "runtime"):
            do("cmake", "-DCOMPONENT=" + component, "-P", folder + "/s/cmake_install.cmake")
        do(folder + "/shared/bin/mlfab-run", "--version")


def test_cmake_components():
    """find_package gives a target for each extra, and names a component that is missing or unknown."""
    need("cmake")
    built = [name for name in ("tls", "curl", "store") if os.path.exists(os.path.join(BUILD, "libmlfab_%s.a" % name))]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(installed(), folder + "/prefix", symlinks=True)  # it is found wherever it is
        where = "-DCMAKE_PREFIX_PATH=" + folder + "/prefix"
        build_and_run(folder + "/all", "find_package(mlfab REQUIRED COMPONENTS tools %s)\nlink_libraries(%s)" % (
            " ".join(built), " ".join("mlfab::" + name for name in built)), where)
        for name in built:
            os.remove("%s/prefix/lib/libmlfab_%s.a" % (folder, name))
        for name, why in (("tls", "component tls is not installed in"), ("tsl", "there is no component tsl; there are tls, curl, store and tools")):
            os.makedirs(folder + "/" + name)
            with open(folder + "/" + name + "/CMakeLists.txt", "w", encoding="ascii") as file:
                file.write(PROJECT % ("find_package(mlfab REQUIRED COMPONENTS %s)" % name, ROOT))
            result = configure(folder + "/" + name, folder + "/" + name + "/build", where)
            expect(result.code != 0 and why in re.sub(r"\s+", " ", result.err), why, result)
        build_and_run(folder + "/optional", "find_package(mlfab REQUIRED OPTIONAL_COMPONENTS tls)", where)


def test_cmake_optimizes():
    """Whatever the build type, or the flags of the caller; nothing is compiled here."""
    need("cmake")
    with tempfile.TemporaryDirectory() as folder:
        for flags, options, wanted in (("", [], "-O2"), ("-g", [], "-O2"), ("-O0", [], "-O0"), ("-O3 -g", [], "-O3"),
                                       ("", ["-DCMAKE_BUILD_TYPE=Release"], "-O3"), ("", ["-DCMAKE_BUILD_TYPE=Debug"], None)):
            build = tempfile.mkdtemp(dir=folder)
            configured(ROOT, build, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *options, CFLAGS=flags)
            with open(build + "/compile_commands.json", encoding="utf-8") as file:
                for entry in json.load(file):
                    expect(re.findall(r" (-O\S*)", entry["command"]) == ([wanted] if wanted else []),
                           "CFLAGS='%s' %s: %s" % (flags, " ".join(options), wanted), entry["command"])


def test_cmake_refuses_another_version():
    need("cmake")
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(folder + "/a")
        with open(folder + "/a/CMakeLists.txt", "w", encoding="ascii") as file:
            file.write(PROJECT % ("find_package(mlfab 99.0 REQUIRED)", ROOT))
        result = configure(folder + "/a", folder + "/a/build", "-DCMAKE_PREFIX_PATH=" + installed())
        expect(result.code != 0 and "99.0" in result.err, "refused, with the version", result)


def test_make_names_the_nearest_tests():
    for word, near in (("conform/test_colective", "tests/conform/test_collective"), ("wrker", "tests/seam/test_worker_"),
                       ("kil9", "tests/process/kill9_test.py"), ("qqqqqq", "tests/*/test_*.c")):
        result = run("make", "-C", ROOT, "BUILD=" + BUILD, "test", "T=" + word, timeout=200, env=environment())
        expect(result.code != 0 and 'no test has "%s" in its name: ' % word in result.err and near in result.err, word, result)
    text = do("make", "-C", ROOT, "-n", "BUILD=" + BUILD, "test", "T=conform/test_collective").out
    expect(re.search(r"run.py.* \S+/tests/conform/test_collective$", text, re.M), "a part of a path", text)


def test_numbers_that_tests_refuse():
    """A seed or a scale that is no number ends a test with one sentence."""
    programs = [BUILD + "/tests/" + name for name in ("seam/test_cache", "sim/test_dag", "unit/test_vote")]
    if not all(os.path.exists(program) for program in programs):
        raise Skip("libcmocka-dev is not installed")
    for program in programs:
        for name, text, wanted in (("MLFAB_SEED", "7x", "a number from 1 on"), ("MLFAB_SEED", "0", "a number from 1 on"),
                                   ("MLFAB_SCALE", "-1", "a number above 0")):
            result = run(program, timeout=200, env=environment(**dict({"MLFAB_SCALE": 0.01}, **{name: text})))
            expect(result.code == 2 and "%s=%s: %s is wanted\n" % (name, text, wanted) in result.err, program, result)


def test_make_finds_mpi_by_any_name():
    with tempfile.TemporaryDirectory() as folder:
        for path in os.environ["PATH"].split(":"):  # every program but those of MPI
            for name in os.listdir(path) if os.path.isdir(path) else ():
                if not name.startswith(("mpicc", "mpirun")) and not os.path.lexists(folder + "/" + name):
                    os.symlink(path + "/" + name, folder + "/" + name)
        for names, found in (("mpicc", "-"), ("mpirun", "default"), ("mpicc.mpich", "default"),
                             ("mpirun.mpich", "mpich"), ("mpicc.openmpi mpirun.openmpi", "openmpi mpich")):
            for name in names.split():  # beside the former ones
                os.symlink(shutil.which("true"), folder + "/" + name)
            text = do("make", "-C", ROOT, "BUILD=" + folder + "/build", "help", env={"PATH": folder}).out
            expect(re.search(r"^  MPI +%s$" % found, text, re.M), "with %s" % names, text)


if __name__ == "__main__":
    main(globals(), jobs=1)
