# Makefile - all commands of this project: `make help` lists them.
#
# Programs and tests link build/libmlfab.a, made of the shipped mlfab.c and mlfab_sim.c, so that the tests test the
# shipped files; a program that does not simulate contains nothing of mlfab_sim.c. Only tests of internals
# (tests/unit, tests/oracle, tests/fuzz) link the parts.
# BUILD is the folder of a variant: `make check` runs this file again with BUILD=build/asan and
# SAN=-fsanitize=address,undefined. WERROR=1 makes warnings errors, V=1 shows whole commands.

BUILD   ?= build
CC      ?= cc
CXX     ?= c++
CLANG   ?= clang
PYTHON  ?= python3
PREFIX  ?= /usr/local
DESTDIR ?=
CFLAGS  ?= -O2 -g
SAN     ?=

VERSION := $(shell sed -n 's/^.define MLFAB_VERSION "\(.*\)"/\1/p' mlfab.h)
MAJOR   := $(firstword $(subst ., ,$(VERSION)))

WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wundef -Wvla -Wstrict-prototypes \
            -Wmissing-prototypes -Wcast-align -Wdouble-promotion $(if $(WERROR),-Werror)
# -MT: a program made in one step is its own target in the list of the headers it depends on.
QUIET     = $(if $(V),,@echo '  CC $@';)
COMPILE   = $(QUIET)$(CC) -std=c11 $(WARNINGS) $(CFLAGS) $(SAN) $(CPPFLAGS) -I. -MMD -MP -MT $@
LINK      = $(CC) $(CFLAGS) $(SAN) $(LDFLAGS)
LIBS     := -lpthread -lm $(LDLIBS)

# ---- lists of programs and tests

PARTS      := $(patsubst %.c,$(BUILD)/parts/%.o,$(wildcard core/*/*.c transports/*.c))
TOOLS       = $(patsubst tools/%.c,$(BUILD)/%,$(filter-out $(if $(CURL_LIBS),,tools/mlfab-fetch.c),$(wildcard tools/*.c)))
PLAN_TOOL  := $(BUILD)/mlfab-plan
FETCH_TOOL := $(BUILD)/mlfab-fetch
EXAMPLES   := $(patsubst examples/%.c,$(BUILD)/examples/%,$(wildcard examples/*.c))
OBJECTS    := $(BUILD)/mlfab.o $(BUILD)/mlfab_sim.o
LIBRARIES  := $(BUILD)/libmlfab.a $(BUILD)/libmlfab.so

# Optional files with a dependency. pkg-config finds OpenSSL; without it what needs it is left out.
TLS_LIBS       := $(shell pkg-config --libs 'libssl >= 1.1.1' libcrypto 2>/dev/null)
TLS_FLAGS      := $(shell pkg-config --cflags libssl libcrypto 2>/dev/null)
TLS_TESTS      := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/extras/test_tls*.c))
TLS_HELPERS    := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/extras/tls_*.c))
# What uses libcurl, and what needs OpenSSL besides.
CURL_LIBS      := $(shell pkg-config --libs 'libcurl >= 7.68' 2>/dev/null)
CURL_FLAGS     := $(shell pkg-config --cflags libcurl 2>/dev/null)
CURL_TESTS     := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/extras/test_curl*.c))
CURL_HELPERS   := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/extras/curl_*.c))
STORE_LIBS     := $(if $(CURL_LIBS),$(if $(TLS_LIBS),$(CURL_LIBS) $(TLS_LIBS)))
STORE_TESTS    := $(patsubst %.c,$(BUILD)/%,tests/extras/test_store.c tests/extras/test_sigv4.c)
STORE_HELPERS  := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/extras/store_*.c))
EXTRAS         := $(patsubst %,$(BUILD)/libmlfab_%.a,$(if $(TLS_LIBS),tls) $(if $(CURL_LIBS),curl) $(if $(STORE_LIBS),store))

# CUDA's compiler, which make deps does not install. GPU_ARCHS: 80 is an A100, 90 an H100 or H200; PTX of the last one is in,
# too, for what comes later. nvcc may be a script in a folder of its own, so it is asked where the toolkit is.
NVCC           := $(or $(NVCC),$(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc))
CUDA           := $(if $(NVCC),$(abspath $(shell $(NVCC) -dryrun -x cu -c /dev/null 2>&1 | sed -n 's/.* TOP=//p')))
GPU_ARCHS      ?= 80 90
GPU_FLAGS       = -std=c++17 -O3 $(foreach arch,$(GPU_ARCHS),-gencode arch=compute_$(arch),code=sm_$(arch)) \
                  -gencode arch=compute_$(lastword $(GPU_ARCHS)),code=compute_$(lastword $(GPU_ARCHS)) -Xcompiler -Wall,-Wextra
GPU_BUILT       = $(BUILD)/gpu/mlfab_gpu.o $(BUILD)/gpu/14_gpu $(addprefix $(BUILD)/tests/gpu/gpu_,bench kernels fabric) \
                  $(if $(HAVE_CMOCKA),$(BUILD)/tests/gpu/gpu_attach)
# What needs no GPU: devices and a runtime that are played, and the kernels' code on the CPU.
GPU_PLAYED     := tests/gpu/gpu_attach $(addprefix tests/unit/test_,device device_direct resident gpu_elements) tests/conform/test_device

# OpenBLAS, or another library with cblas.h that pkg-config knows. CBLAS_FLAGS is for files that call it.
CBLAS          := $(firstword $(foreach name,openblas cblas,$(shell pkg-config --exists $(name) 2>/dev/null && echo $(name))))
CBLAS_LIBS     := $(if $(CBLAS),$(shell pkg-config --libs $(CBLAS)))
CBLAS_FLAGS    := $(if $(CBLAS),$(shell pkg-config --cflags $(CBLAS)))
CBLAS_TESTS    := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/cblas/test_*.c))

# One program per file. Without cmocka those that need it are left out, and counted as skipped.
INTERNAL_TESTS := $(wildcard tests/unit/*.c tests/oracle/*.c tests/seam/*.c)
PUBLIC_TESTS   := $(wildcard tests/conform/*.c tests/sim/*.c tests/oom/*.c)
HELPERS        := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/process/*.c))
FUZZERS        := $(wildcard tests/fuzz/*.c)
HAVE_CMOCKA     = $(shell printf '\043include <stdarg.h>\n\043include <stddef.h>\n\043include <stdint.h>\n\043include <setjmp.h>\n\043include <cmocka.h>\n' \
                    | $(CC) $(CPPFLAGS) -E - >/dev/null 2>&1 && echo 1)
HAVE_ZMQ        = $(shell printf '\043include <zmq.h>\n' | $(CC) $(CPPFLAGS) -E - >/dev/null 2>&1 && echo 1)
# The MPI libraries with which the programs of tests/mpi are built: Debian's names, else one of another name.
MPIS           := $(or $(strip $(foreach mpi,openmpi mpich,$(if $(shell command -v mpicc.$(mpi) >/dev/null && command -v mpirun.$(mpi)),$(mpi)))), \
                    $(if $(shell command -v mpicc >/dev/null && command -v mpirun),default))
MPICC           = OMPI_CC='$(CC)' MPICH_CC='$(CC)' mpicc$(if $(filter-out default,$(1)),.$(1))
MPIFORT         = mpifort$(if $(filter-out default,$(1)),.$(1))
HAVE_MPI        = $(shell command -v mpicc >/dev/null && command -v mpirun >/dev/null && echo 1)
HAVE_GLOO       = $(shell printf '\043include <gloo/allreduce.h>\n' | $(CXX) $(CPPFLAGS) -x c++ -E - >/dev/null 2>&1 && echo 1)
# Files that include cmocka.h, directly or through a header of their folder.
CMOCKA_TESTS    = $(foreach test,$(INTERNAL_TESTS) $(PUBLIC_TESTS),$(if \
                    $(shell grep -l 'cmocka\.h' $(test) $(wildcard $(dir $(test))*.h)),$(test)))
UNBUILDABLE     = $(if $(HAVE_CMOCKA),,$(CMOCKA_TESTS))
BUILT_TESTS     = $(patsubst %.c,$(BUILD)/%,$(filter-out $(UNBUILDABLE),$(INTERNAL_TESTS) $(PUBLIC_TESTS)))
BUILT_TESTS    += $(if $(TLS_LIBS),$(if $(HAVE_CMOCKA),$(TLS_TESTS)))
BUILT_TESTS    += $(if $(CURL_LIBS),$(if $(HAVE_CMOCKA),$(CURL_TESTS)))
BUILT_TESTS    += $(if $(STORE_LIBS),$(if $(HAVE_CMOCKA),$(STORE_TESTS)))
BUILT_TESTS    += $(if $(CBLAS),$(if $(HAVE_CMOCKA),$(CBLAS_TESTS)))
BUILT_TESTS    += $(if $(NVCC),$(if $(HAVE_CMOCKA),$(BUILD)/tests/gpu/gpu_attach) $(if $(SAN),,$(BUILD)/tests/gpu/gpu_kernels))
SKIPPED_TESTS   = $(patsubst %.c,'%=echo libcmocka-dev is not installed; exit 77',$(UNBUILDABLE)) \
                  $(if $(TLS_LIBS),$(if $(HAVE_CMOCKA),,$(TLS_TESTS:%='%=echo libcmocka-dev is not installed; exit 77')), \
                    $(TLS_TESTS:%='%=echo libssl-dev is not installed; exit 77')) \
                  $(if $(CBLAS),$(if $(HAVE_CMOCKA),,$(CBLAS_TESTS:%='%=echo libcmocka-dev is not installed; exit 77')), \
                    $(CBLAS_TESTS:%='%=echo libopenblas-dev is not installed; exit 77')) \
                  $(if $(NVCC),$(if $(HAVE_CMOCKA),,'tests/gpu/gpu_attach=echo libcmocka-dev is not installed; exit 77'), \
                    'tests/gpu/gpu_attach=echo nvcc is not installed: it needs no GPU but the headers of CUDA; exit 77' \
                    'tests/gpu/gpu_kernels=echo nvcc is not installed: it was not compiled; exit 77') \
                  $(if $(CURL_LIBS),$(if $(HAVE_CMOCKA),,$(CURL_TESTS:%='%=echo libcmocka-dev is not installed; exit 77')), \
                    $(CURL_TESTS:%='%=echo libcurl4-openssl-dev is not installed; exit 77')) \
                  $(if $(STORE_LIBS),$(if $(HAVE_CMOCKA),,$(STORE_TESTS:%='%=echo libcmocka-dev is not installed; exit 77')), \
                    $(STORE_TESTS:%='%=echo libcurl4-openssl-dev or libssl-dev is not installed; exit 77'))
SCRIPT_TESTS   := $(wildcard tests/process/*_test.py tests/dropin/*_test.py)

NPROC    := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
# All cores, unless the caller has said -j.
SUBMAKE   = $(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$(NPROC))
RUN_TESTS = MLFAB_BUILD=$(BUILD) $(PYTHON) tests/run.py

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: always all extras demo deps test check amalgamate tools examples bench paper sim fuzz soak dropin switches install \
        uninstall clean help libraries tests-built mpi mpi-built cblas-built gpu gpu-built gpu-test gpu-bench run-tests run-check fuzzers-built

##: the libraries, the tools and the examples, in build/, and what OpenSSL and libcurl allow of the extras
all: libraries tools examples extras

libraries: $(LIBRARIES)

##: build/mlfab-run, build/mlfab-sim, build/mlfab-plan, build/mlfab-top, and build/mlfab-fetch where libcurl is
tools: $(TOOLS)

##: the programs of examples/, in build/examples/
examples: $(EXAMPLES)

# ---- the library

$(OBJECTS): $(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(COMPILE) -fPIC -c -o $@ $<

$(BUILD)/libmlfab.a: $(OBJECTS)
	@rm -f $@
	@$(AR) rcs $@ $(OBJECTS)

$(BUILD)/libmlfab.so: $(OBJECTS)
	@$(LINK) -shared -Wl,-soname,libmlfab.so.$(MAJOR) -o $@.$(VERSION) $(OBJECTS) $(LIBS)
	@ln -sf libmlfab.so.$(VERSION) $@.$(MAJOR)
	@ln -sf libmlfab.so.$(VERSION) $@

##: build/libmlfab_*.a, of extras/: tls (OpenSSL), curl: other traffic and a Pushgateway (libcurl), store: WebDAV and S3 (both)
extras: $(EXTRAS)

$(BUILD)/extras/%.o: extras/%.c
	@mkdir -p $(@D)
	$(COMPILE) $(TLS_FLAGS) $(CURL_FLAGS) -fPIC -c -o $@ $<

$(BUILD)/libmlfab_tls.a: $(BUILD)/extras/mlfab_tls.o
$(BUILD)/libmlfab_curl.a: $(patsubst %,$(BUILD)/extras/mlfab_%.o,curl http)
$(BUILD)/libmlfab_store.a: $(patsubst %,$(BUILD)/extras/mlfab_%.o,store remote sigv4 http)
$(patsubst %,$(BUILD)/libmlfab_%.a,tls curl store):
	@rm -f $@
	@$(AR) rcs $@ $^

# The parts, compiled separately: internal functions have external linkage there, so that tests can call them.
$(BUILD)/parts/%.o: %.c
	@mkdir -p $(@D)
	$(COMPILE) -c -o $@ $<

# An archive, so that a test links only what it uses.
$(BUILD)/parts/libparts.a: $(PARTS)
	@mkdir -p $(@D)
	@rm -f $@
	@$(AR) rcs $@ $(PARTS)

##: writes mlfab.c and mlfab_sim.c from core/ and transports/
amalgamate:
	$(PYTHON) amalgamate.py

# ---- programs

$(filter-out $(PLAN_TOOL) $(FETCH_TOOL),$(TOOLS)): $(BUILD)/%: tools/%.c $(BUILD)/libmlfab.a
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $< $(BUILD)/libmlfab.a $(LDFLAGS) $(LIBS)

$(FETCH_TOOL): $(BUILD)/%: tools/%.c $(BUILD)/extras/mlfab_http.o
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $< $(BUILD)/extras/mlfab_http.o $(LDFLAGS) $(CURL_LIBS) $(LIBS)

# Planning is not in the public header, so mlfab-plan links the parts.
$(PLAN_TOOL): $(BUILD)/%: tools/%.c $(BUILD)/parts/libparts.a
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $< $(BUILD)/parts/libparts.a $(LDFLAGS) $(LIBS)

# mnist multiplies its matrices by cblas where it is found.
$(EXAMPLES): $(BUILD)/%: %.c $(BUILD)/libmlfab.a
	@mkdir -p $(@D)
	$(COMPILE) $(if $(findstring mnist,$@),$(MNIST_FLAGS)) -MF $@.d -o $@ $< $(BUILD)/libmlfab.a $(LDFLAGS) \
	  $(if $(findstring mnist,$@),$(CBLAS_LIBS)) $(LIBS)
MNIST_FLAGS = $(if $(CBLAS),-DMNIST_WITH_CBLAS=1 $(CBLAS_FLAGS))
# `make deps` may have installed a cblas after mnist was built: it is built again when its flags are others.
$(BUILD)/examples/mnist: $(BUILD)/mnist.flags
$(BUILD)/mnist.flags: always
	@mkdir -p $(@D)
	@echo '$(MNIST_FLAGS) $(CBLAS_LIBS)' | cmp -s - $@ || echo '$(MNIST_FLAGS) $(CBLAS_LIBS)' >$@

$(patsubst %.c,$(BUILD)/%,$(INTERNAL_TESTS)): $(BUILD)/%: %.c $(BUILD)/parts/libparts.a
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $< $(BUILD)/parts/libparts.a $(LDFLAGS) -lcmocka $(LIBS)

$(BUILD)/tests/%.o: tests/%.c
	@mkdir -p $(@D)
	$(COMPILE) $(TLS_FLAGS) $(CURL_FLAGS) $(CBLAS_FLAGS) -c -o $@ $<

# These see what a user sees: the headers and the library.
$(patsubst %.c,$(BUILD)/%,$(PUBLIC_TESTS)): $(BUILD)/%: %.c $(BUILD)/libmlfab.a
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $< $(BUILD)/libmlfab.a $(LDFLAGS) \
	  $(if $(filter $<,$(CMOCKA_TESTS)),-lcmocka) $(LIBS)

$(HELPERS): $(BUILD)/%: %.c $(BUILD)/libmlfab.a
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $< $(BUILD)/libmlfab.a $(LDFLAGS) $(LIBS)

$(TLS_TESTS) $(TLS_HELPERS): $(BUILD)/%: %.c $(BUILD)/libmlfab_tls.a $(BUILD)/libmlfab.a
	@mkdir -p $(@D)
	$(COMPILE) $(TLS_FLAGS) -MF $@.d -o $@ $< $(BUILD)/libmlfab_tls.a $(BUILD)/libmlfab.a $(LDFLAGS) \
	  $(if $(findstring /test_,$@),-lcmocka) $(TLS_LIBS) $(LIBS)

# With CUDA: gpu/mlfab_gpu.cu, as users compile it, what uses it, and its tests. gpu_attach needs no GPU and no library of
# CUDA's: it compiles the file's half that is not kernels as C++, over functions of its own.
gpu-built: $(if $(NVCC),$(if $(SAN),,$(GPU_BUILT)))

GPU_COMPILE = $(if $(V),,@echo '  NVCC $@';)$(NVCC) $(GPU_FLAGS) -I.
GPU_LINK    = -L$(CUDA)/lib64 -Xlinker -rpath,$(CUDA)/lib64

$(BUILD)/gpu/mlfab_gpu.o: gpu/mlfab_gpu.cu gpu/mlfab_gpu.h mlfab.h
	@mkdir -p $(@D)
	$(GPU_COMPILE) -c -o $@ $<

$(BUILD)/gpu/14_gpu: examples/14_gpu.cu $(BUILD)/gpu/mlfab_gpu.o $(BUILD)/libmlfab.a
	@mkdir -p $(@D)
	$(GPU_COMPILE) -o $@ $^ $(GPU_LINK) -lcublas $(LIBS)

$(BUILD)/tests/gpu/gpu_kernels $(BUILD)/tests/gpu/gpu_bench: $(BUILD)/%: %.cu $(BUILD)/gpu/mlfab_gpu.o $(BUILD)/libmlfab.a gpu/src/elements.h tests/unit/play.h tests/unit/play_values.h
	@mkdir -p $(@D)
	$(GPU_COMPILE) -o $@ $< $(BUILD)/gpu/mlfab_gpu.o $(BUILD)/libmlfab.a $(LIBS) $(GPU_LINK) $(if $(findstring bench,$@),-lcublas -Xlinker --wrap=cudaLaunchKernel)

$(BUILD)/tests/gpu/gpu_fabric: tests/gpu/gpu_fabric.cu $(BUILD)/gpu/mlfab_gpu.o $(BUILD)/libmlfab.a
	@mkdir -p $(@D)
	$(GPU_COMPILE) -o $@ $^ $(GPU_LINK) $(LIBS)

$(BUILD)/tests/gpu/gpu_attach: tests/gpu/gpu_attach.c gpu/src/device.cu gpu/mlfab_gpu.h $(OBJECTS)
	@mkdir -p $(@D)
	@$(CXX) -std=c++17 -Wall -Wextra $(CFLAGS) $(SAN) -I. -isystem $(CUDA)/include -x c++ -c -o $@.device.o gpu/src/device.cu
	$(COMPILE) -isystem $(CUDA)/include -MF $@.d -o $@ $< $@.device.o $(OBJECTS) $(LDFLAGS) -lcmocka -lstdc++ $(LIBS)

##: builds what is in gpu/, and its tests (nvcc; GPU_ARCHS="80 90")
gpu:
	@[ -n '$(NVCC)' ] || { echo 'make gpu: nvcc was not found; say where it is: make NVCC=/usr/local/cuda/bin/nvcc gpu' >&2; exit 1; }
	+@$(SUBMAKE) tools gpu-built $(if $(HAVE_CMOCKA),$(GPU_PLAYED:%=$(BUILD)/%))

##: tests of gpu/ (those that need a GPU are skipped where there is none)
gpu-test: gpu
	@$(RUN_TESTS) $(if $(HAVE_CMOCKA),$(GPU_PLAYED:%=$(BUILD)/%),$(GPU_PLAYED:%='%=echo libcmocka-dev is not installed; exit 77')) \
	  $(BUILD)/tests/gpu/gpu_kernels tests/process/gpu_test.py

##: speed of the kernels beside a copy and cuBLAS, and registers; of pushes and allreduces of 100 MB; needs a GPU
gpu-bench: gpu
	$(BUILD)/tests/gpu/gpu_bench
	$(BUILD)/mlfab-run -n 2 -s 1 $(BUILD)/tests/gpu/gpu_fabric --time 100

# With cblas: build/cblas/libmlfab.a, the programs that need it, and its tests. test_kernels and test_split link the
# parts, the latter without the library, whose functions it replaces.
CBLAS_PART  := $(BUILD)/cblas/kernels_cblas.o
CBLAS_BUILT := $(addprefix $(BUILD)/cblas/,libmlfab.a mlfab-run 02_push_pull)

cblas-built: $(if $(CBLAS),$(CBLAS_BUILT) $(if $(HAVE_CMOCKA),$(CBLAS_TESTS)))

$(BUILD)/cblas/mlfab.o: mlfab.c
	@mkdir -p $(@D)
	$(COMPILE) -DMLFAB_WITH_CBLAS=1 $(CBLAS_FLAGS) -fPIC -c -o $@ $<

$(CBLAS_PART): core/kernels/kernels_cblas.c
	@mkdir -p $(@D)
	$(COMPILE) -DMLFAB_WITH_CBLAS=1 $(CBLAS_FLAGS) -c -o $@ $<

$(BUILD)/cblas/libmlfab.a: $(BUILD)/cblas/mlfab.o $(BUILD)/mlfab_sim.o
	@rm -f $@
	@$(AR) rcs $@ $^

$(BUILD)/cblas/mlfab-run: tools/mlfab-run.c
$(BUILD)/cblas/02_push_pull: examples/02_push_pull.c
$(BUILD)/cblas/mlfab-run $(BUILD)/cblas/02_push_pull: $(BUILD)/cblas/libmlfab.a
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $(filter %.c,$^) $(BUILD)/cblas/libmlfab.a $(LDFLAGS) $(CBLAS_LIBS) $(LIBS)

$(BUILD)/tests/cblas/test_kernels $(BUILD)/tests/cblas/test_split: $(BUILD)/%: %.c $(CBLAS_PART) $(BUILD)/parts/libparts.a
	@mkdir -p $(@D)
	$(COMPILE) $(CBLAS_FLAGS) -MF $@.d -o $@ $< $(CBLAS_PART) $(BUILD)/parts/libparts.a $(LDFLAGS) -lcmocka \
	  $(if $(findstring split,$@),,$(CBLAS_LIBS)) $(LIBS)

$(BUILD)/tests/cblas/test_fabric: $(BUILD)/%: %.c $(BUILD)/cblas/libmlfab.a
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $< $(BUILD)/cblas/libmlfab.a $(LDFLAGS) -lcmocka $(CBLAS_LIBS) $(LIBS)

$(CURL_TESTS) $(CURL_HELPERS): $(BUILD)/%: %.c $(BUILD)/libmlfab_curl.a $(BUILD)/libmlfab.a
	@mkdir -p $(@D)
	$(COMPILE) $(CURL_FLAGS) -MF $@.d -o $@ $< $(BUILD)/libmlfab_curl.a $(BUILD)/libmlfab.a $(LDFLAGS) \
	  $(if $(findstring /test_,$@),-lcmocka) $(CURL_LIBS) $(LIBS)

$(STORE_TESTS) $(STORE_HELPERS): $(BUILD)/%: %.c $(BUILD)/libmlfab_store.a $(BUILD)/libmlfab.a
	@mkdir -p $(@D)
	$(COMPILE) $(TLS_FLAGS) $(CURL_FLAGS) -MF $@.d -o $@ $< $(BUILD)/libmlfab_store.a $(BUILD)/libmlfab.a $(LDFLAGS) \
	  $(if $(findstring /test_,$@),-lcmocka) $(STORE_LIBS) $(LIBS)

##: build/mpi/*/ for each MPI library: libmlfab_mpi.so, the Fortran example, the programs of tests/mpi
mpi: mpi-built

# With MPI: mlfab.o, and the programs of tests/mpi, once for each MPI library. conform is tests/conform/test_conform.c.
MPI_PROGRAMS := conform linked $(patsubst tests/mpi/%.c,%,$(wildcard tests/mpi/*.c))
define MPI_RULES
$(BUILD)/mpi/$(1)/mlfab.o: mlfab.c
	@mkdir -p $$(@D)
	$$(QUIET)$$(call MPICC,$(1)) -std=c11 $$(WARNINGS) $$(CFLAGS) $$(SAN) $$(CPPFLAGS) -DMLFAB_WITH_MPI=1 -I. -MMD -MP \
	  -MT $$@ -fPIC -c -o $$@ $$<

$(BUILD)/mpi/$(1)/conform: tests/conform/test_conform.c $(BUILD)/mpi/$(1)/mlfab.o
	$$(QUIET)$$(call MPICC,$(1)) -std=c11 $$(WARNINGS) $$(CFLAGS) $$(SAN) $$(CPPFLAGS) -DCONFORM_TCP=0 -DCONFORM_SHM=0 \
	  -DCONFORM_SIM=0 -DCONFORM_MPI=1 -I. -MMD -MP -MT $$@ -MF $$@.d -o $$@ $$< $(BUILD)/mpi/$(1)/mlfab.o \
	  $$(LDFLAGS) -lcmocka $$(LIBS)

# libmlfab_mpi.so exports the functions of MPI that it takes, and nothing of mlfab. plain knows nothing of mlfab; linked is
# plain, with the library before MPI.
$(BUILD)/mpi/$(1)/libmlfab_mpi.so: extras/mlfab_mpi.c $(BUILD)/mpi/$(1)/mlfab.o
	@printf '{ global: MPI_*; local: *; };\n' >$$(@D)/exports.map
	$$(QUIET)$$(call MPICC,$(1)) -std=c11 $$(WARNINGS) $$(CFLAGS) $$(SAN) $$(CPPFLAGS) -I. -MMD -MP -MT $$@ -MF $$@.d -fPIC -shared \
	  -Wl,--version-script=$$(@D)/exports.map -o $$@ $$< $(BUILD)/mpi/$(1)/mlfab.o $$(LDFLAGS) $$(LIBS)

$(BUILD)/mpi/$(1)/apart $(BUILD)/mpi/$(1)/held: $(BUILD)/mpi/$(1)/%: tests/mpi/%.c $(BUILD)/mpi/$(1)/mlfab.o
	$$(QUIET)$$(call MPICC,$(1)) -std=c11 $$(WARNINGS) $$(CFLAGS) $$(SAN) $$(CPPFLAGS) -I. -MMD -MP -MT $$@ -MF $$@.d \
	  -o $$@ $$< $(BUILD)/mpi/$(1)/mlfab.o $$(LDFLAGS) -lcmocka $$(LIBS)

$(BUILD)/mpi/$(1)/plain: tests/mpi/plain.c
	@mkdir -p $$(@D)
	$$(QUIET)$$(call MPICC,$(1)) -std=c11 $$(WARNINGS) $$(CFLAGS) $$(SAN) $$(CPPFLAGS) -o $$@ $$< $$(LDFLAGS)

$(BUILD)/mpi/$(1)/linked: tests/mpi/plain.c $(BUILD)/mpi/$(1)/libmlfab_mpi.so
	$$(QUIET)$$(call MPICC,$(1)) -std=c11 $$(WARNINGS) $$(CFLAGS) $$(SAN) $$(CPPFLAGS) -o $$@ $$< $$(LDFLAGS) \
	  -L$$(@D) -Wl,-rpath,$$(abspath $$(@D)) -lmlfab_mpi

$(BUILD)/mpi/$(1)/13_mpi: examples/13_mpi.f90 extras/mlfab.f90 $(BUILD)/mpi/$(1)/mlfab.o
	$$(QUIET)cd $$(@D) && $$(call MPIFORT,$(1)) -std=f2008 -Wall -O2 -g -o 13_mpi $$(abspath extras/mlfab.f90) \
	  $$(abspath examples/13_mpi.f90) mlfab.o $$(LDFLAGS) $$(LIBS)

$(BUILD)/mpi/$(1)/bench-%: tests/bench/%.c tests/bench/collective_common.h $(BUILD)/mpi/$(1)/mlfab.o
	$$(QUIET)$$(call MPICC,$(1)) -std=c11 $$(CFLAGS) -I. -o $$@ $$< $(BUILD)/mpi/$(1)/mlfab.o $$(LDFLAGS) $$(LIBS)

$(BUILD)/mpi/$(1)/%: tests/mpi/%.c $(BUILD)/mpi/$(1)/mlfab.o
	$$(QUIET)$$(call MPICC,$(1)) -std=c11 $$(WARNINGS) $$(CFLAGS) $$(SAN) $$(CPPFLAGS) -I. -MMD -MP -MT $$@ -MF $$@.d \
	  -o $$@ $$< $(BUILD)/mpi/$(1)/mlfab.o $$(LDFLAGS) $$(LIBS)

mpi-built: $(BUILD)/mpi/$(1)/libmlfab_mpi.so $(if $(shell command -v $(call MPIFORT,$(1))),$(BUILD)/mpi/$(1)/13_mpi)
mpi-built: $(addprefix $(BUILD)/mpi/$(1)/,$(if $(HAVE_CMOCKA),$(MPI_PROGRAMS),$(filter-out conform apart held,$(MPI_PROGRAMS))))
endef
$(foreach mpi,$(MPIS),$(eval $(call MPI_RULES,$(mpi))))

# ---- the main job

##: trains a real network with 4 workers and a server, over TCP and shared memory; kills a server that has a replica
demo: all
	$(PYTHON) tools/demo.py
	@echo; echo "A server with a replica is killed (examples/12_server_dies.c):"
	$(BUILD)/mlfab-run -n 3 --replicas --set heartbeat_ms=100 --server $(BUILD)/examples/12_server_dies \
	  $(BUILD)/examples/12_server_dies

# ---- tests

PACKAGES := libcmocka-dev libsodium-dev libssl-dev libzmq3-dev clang clang-format clang-tidy cmake g++ pkg-config iproute2 \
            musl-tools libopenmpi-dev openmpi-bin libmpich-dev mpich gfortran libopenblas-dev \
            libcurl4-openssl-dev openssl nginx libnginx-mod-http-dav-ext \
            prometheus prometheus-node-exporter prometheus-pushgateway
# What tests/process/launch_test.py runs. These are installed without what they recommend.
LAUNCHERS := slurmctld slurmd slurm-client munge python3-yaml
# Not every system has these packages; what uses them is left out where they are missing. python3-torch, for its torchrun,
# is 146 MB to fetch and 632 MB on disk, and takes two minutes.
OPTIONAL := libgloo-dev python3-torch

##: installs what the tests need (apt, as root)
deps:
	@missing() { for p in "$$@"; do \
	  dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'install ok installed' \
	    || printf ' %s' $$p; done; }; \
	needed=$$(missing $(PACKAGES)); launchers=$$(missing $(LAUNCHERS)); optional=$$(missing $(OPTIONAL)); \
	if [ -z "$$needed$$launchers$$optional" ]; then \
	  echo "All of $(PACKAGES) $(LAUNCHERS) $(OPTIONAL) are installed."; exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "make deps installs with apt, as root. What is missing:"; \
	  echo "  apt-get install -y$$needed$$launchers$$optional"; [ -z "$$needed$$launchers" ]; exit; fi; \
	export DEBIAN_FRONTEND=noninteractive; \
	policy=/usr/sbin/policy-rc.d; if [ ! -e $$policy ]; then trap "rm -f $$policy" EXIT; \
	  printf '\043!/bin/sh\nexit 101\n' >$$policy && chmod 755 $$policy; fi; : no service is started; \
	install() { echo "$$*"; "$$@" >/dev/null 2>&1 || { apt-get update && "$$@"; }; }; \
	if [ -n "$$needed" ]; then install apt-get install -y $$needed || exit; fi; \
	if [ -n "$$launchers" ]; then install apt-get install -y --no-install-recommends $$launchers || exit; fi; \
	for p in $$optional; do command="apt-get install -y --no-install-recommends $$p"; echo "$$command"; \
	  { $$command || { apt-get update && $$command; }; } >/dev/null 2>&1 \
	    || echo "$$p cannot be installed: what needs it is left out"; done

# make looks for installed packages when it starts, so the tests run in a make that starts after deps.
##: builds and runs all tests; ends with `N passed, N failed, N skipped`
test: $(filter deps,$(MAKECMDGOALS))
	+@$(SUBMAKE) all tests-built mpi-built
	+@$(SUBMAKE) run-tests

tests-built: $(BUILT_TESTS) $(HELPERS) $(if $(TLS_LIBS),$(TLS_HELPERS)) $(if $(CURL_LIBS),$(CURL_HELPERS)) $(if $(STORE_LIBS),$(STORE_HELPERS)) cblas-built gpu-built

# Long tests have their time limit in seconds after an @.
LIMITS := tests/process/mpi_test.py@900 tests/process/launch_test.py@600 tests/process/kill9_test.py@1200 tests/process/reshard_test.py@400 tests/process/store_test.py@600
limit   = $(foreach test,$(1),$(firstword $(filter $(test)@%,$(LIMITS)) $(test)))

# Servers whose models are on devices that are played.
ON_DEVICE := unit/test_model $(addprefix sim/test_,consistency growth succession schedule servers failover)

# Tests with one thread run on all processors; tests with several processes or threads run alone.
ALONE = $(BUILD)/tests/conform/% $(BUILD)/tests/extras/% $(addprefix $(BUILD)/tests/unit/test_,shm_coll shm tcp)
run-tests:
	@$(RUN_TESTS) --jobs $(NPROC) \
	  'amalgamation=$(PYTHON) amalgamate.py --check' \
	  'symbols=tests/dropin/symbols.sh $(OBJECTS) $(BUILD)/libmlfab.so' \
	  $(SKIPPED_TESTS) $(filter-out $(ALONE),$(BUILT_TESTS)) \
	  $(if $(HAVE_CMOCKA),$(foreach test,$(ON_DEVICE),'$(test) on devices@400=MLFAB_PLAYED=1 MLFAB_SCALE=0.2 $(BUILD)/tests/$(test)')) \
	  --alone $(filter $(ALONE),$(BUILT_TESTS)) $(call limit,$(SCRIPT_TESTS))

##: tests under sanitizers, fuzz smoke, drop-in, amalgamation, format and tidy
check: $(filter deps test,$(MAKECMDGOALS))
	+@$(SUBMAKE) tools
	+@$(SUBMAKE) BUILD=$(BUILD)/asan CFLAGS='-O1 -g -fno-omit-frame-pointer' \
	  SAN='-fsanitize=address,undefined -fno-sanitize-recover=all' tools tests-built fuzzers-built
	+@$(SUBMAKE) BUILD=$(BUILD)/tsan CFLAGS='-O1 -g' SAN=-fsanitize=thread tools \
	  $(patsubst $(BUILD)/%,$(BUILD)/tsan/%,$(HELPERS)) $(patsubst tests/%,$(BUILD)/tsan/tests/%,$(TSAN_TESTS))
	+@$(SUBMAKE) run-check

# Tests with threads, or with memory shared between processes.
TSAN_TESTS = $(if $(HAVE_CMOCKA),$(patsubst %.c,%,$(wildcard tests/conform/*.c)))
HAND_WRITTEN = mlfab.h mlfab_node.h mlfab_sim.h $(wildcard core/*/*.[ch] transports/*.[ch] extras/*.[ch] tools/*.[ch] examples/*.[ch] tests/*/*.[ch]) \
               gpu/mlfab_gpu.h $(wildcard gpu/src/*.cu gpu/src/*.h tests/gpu/*.cu examples/*.cu)

# clang-tidy's analyzer with fewer paths than its 225,000.
TIDY = clang-tidy --quiet --warnings-as-errors="*" --extra-arg=-Xclang --extra-arg=-analyzer-config \
       --extra-arg=-Xclang --extra-arg=max-nodes=60000
run-check:
	@$(RUN_TESTS) --jobs $(NPROC) \
	  'amalgamation=$(PYTHON) amalgamate.py --check' \
	  'format=command -v clang-format >/dev/null || { echo clang-format is not installed; exit 77; }; clang-format --dry-run -Werror $(HAND_WRITTEN)' \
	  'tidy@1200=command -v clang-tidy >/dev/null || { echo clang-tidy is not installed; exit 77; }; printf "%s\n" $(wildcard core/*/*.c transports/*.c tools/*.c) $(if $(TLS_LIBS),extras/mlfab_tls.c) $(if $(CURL_LIBS),extras/mlfab_curl.c extras/mlfab_http.c) $(if $(STORE_LIBS),$(addprefix extras/mlfab_,store.c remote.c sigv4.c)) | xargs -P $(NPROC) -n 1 sh -c '\''$(TIDY) "$$0" -- -std=c11 -I. 2>/dev/null'\''' \
	  'dropin@1200=tests/dropin/dropin.sh' 'switches@600=tests/dropin/switches.sh' 'planted bugs@2700=$(PYTHON) tests/plant.py --every 15' \
	  $(patsubst $(BUILD)/%,$(BUILD)/asan/%@600,$(filter-out $(ALONE) $(BUILD)/tests/sim/% %/gpu_kernels,$(BUILT_TESTS))) \
	  $(foreach sim,$(patsubst $(BUILD)/%,$(BUILD)/asan/%,$(filter $(BUILD)/tests/sim/%,$(BUILT_TESTS))),'$(sim)@600=MLFAB_SCALE=0.2 $(sim)') \
	  $(foreach test,$(FUZZERS:.c=),'$(test)@200=MLFAB_FUZZ_SECONDS=10 $(BUILD)/asan/$(test)') \
	  'libfuzzer@900=command -v $(CLANG) >/dev/null || { echo $(CLANG) is not installed; exit 77; }; $(MAKE) fuzz FUZZ_SECONDS=10' \
	  --alone $(patsubst $(BUILD)/%,$(BUILD)/asan/%@600,$(filter $(ALONE),$(BUILT_TESTS))) \
	  $(foreach test,$(TSAN_TESTS),'$(BUILD)/tsan/$(test)@1200=MLFAB_SCALE=0.1 tests/tsan.sh $(BUILD)/tsan/$(test)') \
	  $(foreach script,startup kill9,$(foreach san,asan tsan,'$(san)/$(script)@900=MLFAB_BUILD=$(BUILD)/$(san) tests/tsan.sh tests/process/$(script)_test.py'))

##: copies the generated files and their headers into an empty folder, and builds and runs a trainer there in many ways
dropin: all
	@$(RUN_TESTS) 'dropin@1200=tests/dropin/dropin.sh'

##: compiles without each group that can be left out, and the profiles, and runs the smallest
switches: all
	@$(RUN_TESTS) 'switches@600=tests/dropin/switches.sh'

##: whole clusters in one process, from seeds (MLFAB_SCALE=1: a hundredth; 100: all of them)
sim:
	+@$(SUBMAKE) $(patsubst %.c,$(BUILD)/%,$(wildcard tests/sim/*.c))
	@$(RUN_TESTS) $(patsubst %.c,$(BUILD)/%@36000,$(wildcard tests/sim/*.c))

##: the long tests in full length, and random mutants (hours); MLFAB_SCALE=5: a twentieth, without mutants and planted bugs
soak: export MLFAB_SCALE = 100
soak:
	+@$(SUBMAKE) all tests-built
	@$(RUN_TESTS) --jobs $(NPROC) \
	  $(patsubst %.c,$(BUILD)/%@36000,$(wildcard tests/sim/*.c tests/oom/*.c) $(addprefix tests/unit/test_,order.c replicate.c divergence.c distance.c)) \
	  --alone tests/process/kill9_test.py@36000 tests/process/reshard_test.py@3600 \
	    tests/process/close_test.py@14400 tests/process/soak_test.py@3600 \
	  $(if $(filter 100,$(MLFAB_SCALE)),'planted bugs@7200=$(PYTHON) tests/plant.py') \
	  $(if $(filter 100,$(MLFAB_SCALE)),"mutants@36000=CC='$(CC)' $(PYTHON) tests/mutate.py --goal 0.8")

# ---- fuzzing: a small main that mutates frames by itself, and libFuzzer where clang has it

fuzzers-built: $(patsubst %.c,$(BUILD)/%,$(FUZZERS))

$(patsubst %.c,$(BUILD)/%,$(FUZZERS)): $(BUILD)/%: %.c $(BUILD)/parts/libparts.a
	@mkdir -p $(@D)
	$(COMPILE) -DFUZZ_MAIN -MF $@.d -o $@ $< $(BUILD)/parts/libparts.a $(LDFLAGS) $(LIBS)

FUZZED := $(wildcard core/*/*.c transports/*.c)
FUZZ    = $(CLANG) -std=c11 -O1 -g -I.
##: fuzzes the frame decoder with libFuzzer (clang), for FUZZ_SECONDS each (60)
fuzz:
	@mkdir -p $(BUILD)/libfuzzer
	@printf '%s\n' $(FUZZED) | xargs -P $(NPROC) -I {} sh -c '$(FUZZ) -fsanitize=fuzzer-no-link,address,undefined \
	  -c -o $(BUILD)/libfuzzer/$$(basename {} .c).o {}'
	@for f in $(FUZZERS); do name=$$(basename $$f .c); \
	  mkdir -p $(BUILD)/libfuzzer/$$name.corpus; \
	  $(FUZZ) -fsanitize=fuzzer,address,undefined -o $(BUILD)/libfuzzer/$$name $$f \
	    $(patsubst %.c,$(BUILD)/libfuzzer/%.o,$(notdir $(FUZZED))) $(LIBS) || exit 1; \
	  $(BUILD)/libfuzzer/$$name -max_total_time=$${FUZZ_SECONDS:-60} -print_final_stats=1 \
	    $(BUILD)/libfuzzer/$$name.corpus || exit 1; done

# ---- figures

# Ranks of partial allreduces: tests/bench/eager.py and train_eager.py run them.
EAGER_BENCHES  = $(BUILD)/bench-eager-ranks $(BUILD)/bench-eager-train
# Benchmarks of internals, or of two fabrics at a time, are separate programs and link the parts.
PART_BENCHES  := plan filter version tagged kernels small
# Ranks of collectives, ours and others': tests/bench/collective.py runs them.
RANK_BENCHES   = $(addprefix $(BUILD)/bench-collective-,ours limit $(if $(HAVE_MPI),mpi) \
                   $(if $(HAVE_GLOO),gloo)) $(foreach mpi,$(filter-out default,$(MPIS)), \
                   $(addprefix $(BUILD)/mpi/$(mpi)/bench-collective_,ours mpi))
BENCH_SOURCES := $(filter-out $(PART_BENCHES:%=tests/bench/%.c) $(wildcard tests/bench/collective_*.c \
                   tests/bench/eager_*.c), \
                   $(wildcard tests/bench/*.c))

$(BUILD)/bench: $(BENCH_SOURCES) $(wildcard tests/bench/*.h) mlfab.h $(BUILD)/libmlfab.a \
                $(if $(TLS_LIBS),$(BUILD)/libmlfab_tls.a)
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $(if $(HAVE_ZMQ),,-DMLFAB_BENCH_ZMQ=0) $(if $(TLS_LIBS),,-DMLFAB_BENCH_TLS=0) \
	  $(BENCH_SOURCES) $(if $(TLS_LIBS),$(BUILD)/libmlfab_tls.a) $(BUILD)/libmlfab.a $(LDFLAGS) \
	  $(if $(HAVE_ZMQ),-lzmq) $(TLS_LIBS) $(LIBS)

$(PART_BENCHES:%=$(BUILD)/bench-%): $(BUILD)/bench-%: tests/bench/%.c $(BUILD)/parts/libparts.a
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $< $(filter %.o,$^) $(BUILD)/parts/libparts.a $(LDFLAGS) \
	  $(if $(findstring kernels,$@),$(CBLAS_LIBS)) $(LIBS)
$(BUILD)/bench-kernels: $(if $(CBLAS),$(CBLAS_PART))

$(BUILD)/bench-collective-ours: tests/bench/collective_ours.c $(BUILD)/libmlfab.a
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $< $(BUILD)/libmlfab.a $(LDFLAGS) $(LIBS)

$(EAGER_BENCHES): $(BUILD)/bench-eager-%: tests/bench/eager_%.c $(BUILD)/libmlfab.a
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $< $(BUILD)/libmlfab.a $(LDFLAGS) $(LIBS)

$(BUILD)/bench-collective-limit: tests/bench/collective_limit.c
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $< $(LDFLAGS) $(LIBS)

$(BUILD)/bench-collective-mpi: tests/bench/collective_mpi.c tests/bench/collective_common.h
	@mkdir -p $(@D)
	$(QUIET)OMPI_CC='$(CC)' mpicc -std=c11 $(CFLAGS) -o $@ $< $(LDFLAGS)

$(BUILD)/bench-collective-gloo: tests/bench/collective_gloo.cc tests/bench/collective_common.h
	@mkdir -p $(@D)
	$(QUIET)$(CXX) -Wall -Wextra $(CFLAGS) -o $@ $< $(LDFLAGS) -lgloo -lpthread

##: measures against memcpy, sockets, ZeroMQ, Open MPI, Gloo, OpenBLAS and a paper; a table, build/bench.tsv, and the goals met
bench: $(filter deps,$(MAKECMDGOALS))
	+@$(SUBMAKE) $(BUILD)/bench $(PART_BENCHES:%=$(BUILD)/bench-%) $(RANK_BENCHES) $(EAGER_BENCHES) tools examples
	$(BUILD)/bench $(BUILD)/bench.tsv
	for name in $(PART_BENCHES); do $(BUILD)/bench-$$name $(BUILD)/bench.tsv || exit 1; done
	$(PYTHON) tests/bench/collective.py $(BUILD) $(BUILD)/bench.tsv
	$(PYTHON) tests/bench/eager.py $(BUILD) $(BUILD)/bench.tsv
	$(PYTHON) tests/bench/train.py $(BUILD) $(BUILD)/bench.tsv
	$(PYTHON) tests/bench/train_eager.py $(BUILD) $(BUILD)/bench.tsv
	$(PYTHON) tests/bench/goals.py $(BUILD)/bench.tsv

PAPER_SOURCES := $(wildcard tests/paper/*.c)

# The conditions of consistency are not in the public header, so this program links the parts.
$(BUILD)/paper: $(PAPER_SOURCES) $(wildcard tests/paper/*.h) mlfab.h $(BUILD)/parts/libparts.a
	@mkdir -p $(@D)
	$(COMPILE) -MF $@.d -o $@ $(PAPER_SOURCES) $(BUILD)/parts/libparts.a $(LDFLAGS) $(LIBS)

##: MLfabric's, FluentPS's, TDF's, eagerSGD's and ASAP's evaluation, beside their figures: build/paper.tsv, docs/paper.md
paper: $(filter deps,$(MAKECMDGOALS))
	+@$(SUBMAKE) $(BUILD)/paper
	$(BUILD)/paper $(BUILD)/paper.tsv docs/paper.md

# ---- install

INSTALL  = install
LIBDIR  ?= $(PREFIX)/lib
D_LIB    = $(DESTDIR)$(LIBDIR)
D_CMAKE  = $(D_LIB)/cmake/mlfab
SUBST    = sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' \
               -e 's|@INCLUDEDIR@|$(PREFIX)/include|' -e 's|@VERSION@|$(VERSION)|'

# The headers of the extras that were built.
EXTRA_HEADERS = $(patsubst $(BUILD)/lib%.a,extras/%.h,$(EXTRAS))

##: headers, libraries, pkg-config and CMake files, tools, under DESTDIR/PREFIX (/usr/local)
install: libraries tools extras
	$(INSTALL) -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/bin $(D_LIB)/pkgconfig $(D_CMAKE)
	$(INSTALL) -m 644 mlfab.h mlfab_node.h mlfab_sim.h $(DESTDIR)$(PREFIX)/include
	$(INSTALL) -m 644 $(BUILD)/libmlfab.a $(D_LIB)/libmlfab.a
	$(if $(EXTRAS),$(INSTALL) -m 644 $(EXTRA_HEADERS) $(DESTDIR)$(PREFIX)/include)
	$(if $(EXTRAS),$(INSTALL) -m 644 $(EXTRAS) $(D_LIB))
	$(INSTALL) -m 755 $(BUILD)/libmlfab.so.$(VERSION) $(D_LIB)/libmlfab.so.$(VERSION)
	ln -sf libmlfab.so.$(VERSION) $(D_LIB)/libmlfab.so.$(MAJOR)
	ln -sf libmlfab.so.$(VERSION) $(D_LIB)/libmlfab.so
	$(INSTALL) -m 755 $(TOOLS) $(DESTDIR)$(PREFIX)/bin
	$(SUBST) mlfab.pc.in > $(D_LIB)/pkgconfig/mlfab.pc
	$(SUBST) cmake/mlfabConfigVersion.cmake.in > $(D_CMAKE)/mlfabConfigVersion.cmake
	$(INSTALL) -m 644 cmake/mlfabConfig.cmake $(D_CMAKE)/mlfabConfig.cmake

##: removes what install put there
uninstall:
	rm -f $(DESTDIR)$(PREFIX)/include/mlfab.h $(DESTDIR)$(PREFIX)/include/mlfab_node.h $(DESTDIR)$(PREFIX)/include/mlfab_sim.h $(D_LIB)/libmlfab.a $(D_LIB)/libmlfab.so \
	  $(D_LIB)/libmlfab.so.$(MAJOR) $(D_LIB)/libmlfab.so.$(VERSION) $(D_LIB)/pkgconfig/mlfab.pc \
	  $(EXTRA_HEADERS:extras/%=$(DESTDIR)$(PREFIX)/include/%) $(EXTRAS:$(BUILD)/%=$(D_LIB)/%) \
	  $(patsubst $(BUILD)/%,$(DESTDIR)$(PREFIX)/bin/%,$(TOOLS))
	rm -rf $(D_CMAKE)

##: removes build/
clean:
	rm -rf $(BUILD)

# Programs that tests start, or compile with.
TOLD := gfortran nginx prometheus prometheus-node-exporter prometheus-pushgateway promtool slurmctld torchrun

##: this list
help:
	@awk '/^##: / { text = substr($$0, 5); next } \
	  text && /^[a-z-]+:/ { split($$0, part, ":"); \
	    printf "  make %-11s %s\n", part[1], text; text = "" }' Makefile
	@echo 'Found here (make deps installs what is not, but for nvcc):'
	@printf '  %-24s %s\n' MPI '$(or $(MPIS),-)' cblas '$(if $(CBLAS),$(CBLAS) $(shell pkg-config --modversion $(CBLAS)),-)' \
	  OpenSSL '$(or $(if $(TLS_LIBS),$(shell pkg-config --modversion libssl)),-)' libcurl '$(or $(if $(CURL_LIBS),$(shell pkg-config --modversion libcurl)),-)' \
	  cmocka '$(if $(HAVE_CMOCKA),yes,-)' ZeroMQ '$(if $(HAVE_ZMQ),yes,-)' Gloo '$(if $(HAVE_GLOO),yes,-)' \
	  nvcc '$(or $(NVCC),-)' $(foreach program,$(TOLD),$(program) '$(or $(shell PATH="$$PATH:/usr/sbin:/sbin"; command -v $(program)),-)')
	@[ ! -x $(BUILD)/mlfab-run ] || { echo 'Built:'; echo "  $$($(BUILD)/mlfab-run --version)"; }

-include $(shell find $(BUILD) -name '*.d' -not -path '$(BUILD)/*san/*' -not -path '$(BUILD)/plant*' 2>/dev/null)
