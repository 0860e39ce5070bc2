# Makefile - all commands of this project: `make help` lists them.
#
# BUILD is the folder of a variant. Each variant compiles a source file once: `make check` runs this file again with
# BUILD=build/asan and SAN=-fsanitize=address,undefined. WERROR=1 makes warnings errors, V=1 shows whole commands.
# The library, its tools, the examples and the tests of a user's view link build/libmlfab.a, made of the shipped mlfab.c
# and of build/mlfab_sim.c. Tests of internals and simulations link the same code in parts, and so does everything under sanitizers.

BUILD   ?= build
CC      ?= cc
CXX     ?= c++
CLANG   ?= clang
PYTHON  ?= python3
PREFIX  ?= /usr/local
DESTDIR ?=
CFLAGS  ?= -O2 -g
SAN     ?=
NVCC    := $(or $(NVCC),$(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc))
NPROC   := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
VERSION := $(shell sed -n 's/^.define MLFAB_VERSION "\(.*\)"/\1/p' mlfab.h)
MAJOR   := $(firstword $(subst ., ,$(VERSION)))

# ---- optional programs and libraries of this machine, and the packages that have them
FOUND := $(shell sh tests/found.sh '$(CC)' '$(CXX)' '$(or $(NVCC),nvcc)')
found  = $(filter $(1),$(FOUND))
MPIS  := $(patsubst mpi:%,%,$(filter mpi:%,$(FOUND)))
CBLAS := $(patsubst cblas:%,%,$(filter cblas:%,$(FOUND)))
PACKAGES := cmocka=libcmocka-dev tls=libssl-dev curl=libcurl4-openssl-dev cblas=libopenblas-dev nvcc=nvcc

package     = $(if $(2),$(shell pkg-config --$(1) $(2)))
TLS_LIBS   := $(call package,libs,$(if $(call found,tls),libssl libcrypto))
CURL_LIBS  := $(call package,libs,$(if $(call found,curl),libcurl))
CBLAS_LIBS := $(call package,libs,$(CBLAS))
EXTRA_FLAGS := $(call package,cflags,$(if $(call found,tls),libssl libcrypto) $(if $(call found,curl),libcurl))
CBLAS_FLAGS := $(call package,cflags,$(CBLAS))

# ---- compiling: one rule
WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wundef -Wvla -Wstrict-prototypes \
            -Wmissing-prototypes -Wcast-align -Wdouble-promotion $(if $(WERROR),-Werror)
QUIET     = $(if $(V),,@echo '  CC $@';)
CACHED   := $(if $(findstring ccache,$(CC)),,$(call found,ccache))
FLAGS     = -std=c11 $(WARNINGS) $(CFLAGS) $(OPTIMIZE) $(SAN) $(CPPFLAGS) $(MORE) -I. -MMD -MP -fPIC
LINK      = $(CC) $(CFLAGS) $(SAN) $(LDFLAGS)
LIBS     := -lpthread -lm $(LDLIBS)

# Tests are compiled with less optimization, since most of them run for less time than that takes. Sanitizers add much code.
$(BUILD)/tests/%.o: OPTIMIZE = $(if $(SAN),-O0,-O1)
$(BUILD)/tests/bench/%.o $(BUILD)/tests/paper/%.o $(BUILD)/tests/fuzz/%.o $(BUILD)/tests/unit/test_traps.o $(BUILD)/tests/sim/test_collective.o: OPTIMIZE =
$(BUILD)/extras/%.o $(BUILD)/tests/extras/%.o: MORE = $(EXTRA_FLAGS)
$(BUILD)/tests/fuzz/%.o: MORE = $(if $(findstring fuzzer,$(SAN)),,-DFUZZ_MAIN)

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(QUIET)$(CACHED) $(CC) $(FLAGS) -c -o $@ $<

$(BUILD)/%.a:
	@rm -f $@
	@$(AR) rcs $@ $(filter %.o,$^)

# ---- the library, tools, examples
OBJECTS    := $(BUILD)/mlfab.o $(BUILD)/mlfab_sim.o
PARTS      := $(patsubst %.c,$(BUILD)/%.o,$(wildcard core/*/*.c transports/*.c))
LIBPARTS   := $(BUILD)/libparts.a
LIBRARY    := $(if $(SAN),$(LIBPARTS),$(BUILD)/libmlfab.a)
SHARED     := $(BUILD)/libmlfab.so
TOOLS      := $(patsubst tools/%.c,$(BUILD)/%,$(wildcard tools/mlfab-*.c))
EXAMPLES   := $(patsubst %.c,$(BUILD)/%,$(wildcard examples/*.c))
EXTRAS     := $(patsubst %,$(BUILD)/libmlfab_%.a,$(call found,tls) $(call found,curl) $(if $(TLS_LIBS),$(if $(CURL_LIBS),store)))

.DEFAULT_GOAL := all
.DELETE_ON_ERROR .SECONDARY .SUFFIXES:
MAKEFLAGS += --no-builtin-rules

#@ Build
all: libraries tools examples extras ##: the libraries, the tools and the examples, in build/, and what OpenSSL and libcurl allow of the extras
libraries: $(BUILD)/libmlfab.a $(SHARED) ##: build/libmlfab.a and build/libmlfab.so
tools: $(TOOLS) $(SHARED) ##: build/mlfab-run, mlfab-sim, mlfab-plan, mlfab-top, and build/libmlfab.so
examples: $(EXAMPLES) ##: the programs of examples/, in build/examples/
extras: $(EXTRAS) ##: build/libmlfab_*.a, of extras/: tls (OpenSSL), curl: other traffic and a Pushgateway (libcurl), store: WebDAV and S3 (both)
amalgamate: ##: writes mlfab.c from core/ and transports/
	$(PYTHON) amalgamate.py

$(BUILD)/mlfab_sim.c: amalgamate.py $(wildcard core/base/*.[ch]) transports/sim.c
	@mkdir -p $(@D)
	@command -v $(PYTHON) >/dev/null || { echo 'make: $(PYTHON) was not found; it writes the simulator, $@' >&2; exit 1; }
	@$(PYTHON) amalgamate.py --simulator $@ >/dev/null
# The files of each profile, which scripts compile and count.
PROFILED := $(patsubst %,$(BUILD)/profiles/%/mlfab.c,minimal coll core)
$(PROFILED): $(BUILD)/profiles/%/mlfab.c: amalgamate.py tools/absent.py $(wildcard *.h core/*/*.[ch] transports/*.[ch])
	@$(PYTHON) amalgamate.py --profile $* -o $(@D) >/dev/null && touch $@
# gcc takes 12 s to judge the indentation of so long a file; it judges that of the parts.
$(BUILD)/mlfab.o: MORE = -Wno-misleading-indentation
$(BUILD)/mlfab_sim.o: $(BUILD)/mlfab_sim.c
	$(QUIET)$(CACHED) $(CC) $(FLAGS) -c -o $@ $<
$(BUILD)/libmlfab.a: $(OBJECTS)
$(LIBPARTS): $(PARTS)
$(SHARED): $(OBJECTS)
	@$(LINK) -shared -Wl,-soname,libmlfab.so.$(MAJOR) -o $@.$(VERSION) $(OBJECTS) $(LIBS)
	@ln -sf libmlfab.so.$(VERSION) $@.$(MAJOR) && ln -sf libmlfab.so.$(VERSION) $@
$(BUILD)/libmlfab_tls.a: $(BUILD)/extras/mlfab_tls.o
$(BUILD)/libmlfab_curl.a: $(patsubst %,$(BUILD)/extras/mlfab_%.o,curl http)
$(BUILD)/libmlfab_store.a: $(patsubst %,$(BUILD)/extras/mlfab_%.o,store remote sigv4 http)
# Planning is not in the public header, so mlfab-plan links the parts.
$(BUILD)/mlfab-plan: $(BUILD)/tools/replicate.o $(LIBPARTS)
$(filter-out %-plan,$(TOOLS)): $(LIBRARY)
$(TOOLS): $(BUILD)/%: $(BUILD)/tools/%.o

# mnist multiplies its matrices by cblas if it is found. A cblas that is installed later builds it again.
$(BUILD)/examples/mnist: LIBS += $(CBLAS_LIBS)
$(BUILD)/examples/mnist.o: MORE = $(if $(CBLAS),-DMNIST_WITH_CBLAS=1 $(CBLAS_FLAGS))
$(BUILD)/examples/mnist.o: $(BUILD)/mnist.flags
$(BUILD)/mnist.flags: always
	@mkdir -p $(@D)
	@echo '$(CBLAS_FLAGS) $(CBLAS_LIBS)' | cmp -s - $@ || echo '$(CBLAS_FLAGS) $(CBLAS_LIBS)' >$@

#@ The main job
demo: ##: trains a real network with 4 workers and a server, over TCP and shared memory; kills a server that has a replica
	@echo 'make demo: builds the library and its tools (about 50 s on two cores), then trains for about 30 s.'
	+@$(SUBMAKE) $(BUILD)/mlfab-run $(BUILD)/examples/mnist $(BUILD)/examples/12_server_dies
	$(PYTHON) tools/demo.py
	@echo; echo 'A server with a replica is killed (examples/12_server_dies.c):'
	$(BUILD)/mlfab-run -n 3 --replicas --set heartbeat_ms=200 --server $(BUILD)/examples/12_server_dies $(BUILD)/examples/12_server_dies

# ---- tests: one program a file, in a table
# $(call programs,sources,archives and objects,libraries,words of found.sh that it needs,C or CXX)
define programs
$(patsubst %.c,$(BUILD)/%,$(1)): $(BUILD)/%: $(BUILD)/%.o $(2)
	@$$(LINK) -o $$@ $$^ $(3) $$(LIBS)
$(foreach source,$(1),$(eval NEEDS_$(source:.c=) := $(4)))
endef
table = $(eval $(call programs,$(1),$(2),$(3),$(4)))

INTERNAL := $(wildcard tests/unit/*.c tests/seam/*.c tests/sim/*.c tests/oom/*.c)
PUBLIC   := $(wildcard tests/conform/*.c)
FUZZERS  := $(wildcard tests/fuzz/*.c)
HELPERS  := $(wildcard tests/process/*.c)
TLS      := $(wildcard tests/extras/test_tls*.c tests/extras/tls_*.c)
CURL     := $(wildcard tests/extras/test_curl*.c tests/extras/curl_*.c)
STORE    := $(wildcard tests/extras/test_s*.c tests/extras/store_*.c)
BLAS     := $(addprefix tests/cblas/test_,kernels.c split.c fabric.c)
# The parts that a switch changes are compiled again, and linked before the others.
BLAS_PARTS := $(addprefix $(BUILD)/cblas/core/,kernels/kernels.o kernels/kernels_combine.o kernels/kernels_cblas.o open/compose.o open/build_info.o)

#                  sources        archives                               libraries                  needs
$(call table,$(INTERNAL),         $(LIBPARTS),                           -lcmocka,                  cmocka)
$(call table,$(PUBLIC),           $(LIBRARY),                            -lcmocka,                  cmocka)
$(call table,$(FUZZERS),          $(LIBPARTS))
$(call table,$(HELPERS) $(wildcard examples/*.c), $(LIBRARY))
$(call table,$(TLS),              $(BUILD)/libmlfab_tls.a $(LIBRARY),    -lcmocka $(TLS_LIBS),      cmocka tls)
$(call table,$(CURL),             $(BUILD)/libmlfab_curl.a $(LIBRARY),   -lcmocka $(CURL_LIBS),     cmocka curl)
$(call table,$(STORE),            $(BUILD)/libmlfab_store.a $(LIBRARY),  -lcmocka $(CURL_LIBS) $(TLS_LIBS), cmocka tls curl)
$(call table,$(filter-out %/test_split.c,$(BLAS)), $(BLAS_PARTS) $(LIBPARTS), -lcmocka $(CBLAS_LIBS), cmocka cblas)
$(call table,tests/cblas/test_split.c, $(BLAS_PARTS) $(LIBPARTS),        -lcmocka,                  cmocka cblas)
NEEDS_tests/gpu/gpu_attach  := cmocka nvcc
NEEDS_tests/gpu/gpu_kernels := nvcc
# A few helpers of scripts need no cmocka.
$(foreach helper,$(filter-out tests/extras/test_%,$(TLS) $(CURL) $(STORE)),$(eval NEEDS_$(helper:.c=) := $(filter-out cmocka,$(NEEDS_$(helper:.c=)))))

SCRIPTS    := $(wildcard tests/process/*_test.py tests/dropin/*_test.py)
EXTRA_TESTS := $(filter tests/extras/test_%,$(TLS) $(CURL) $(STORE))
MAIN_TESTS := $(patsubst %.c,%,$(INTERNAL) $(PUBLIC) $(EXTRA_TESTS))
CHECK_TESTS := $(patsubst %.c,%,$(BLAS)) tests/gpu/gpu_attach $(if $(SAN),,tests/gpu/gpu_kernels)

# The first need of a program that is not found. runnable: programs without one. tests: how run.py gets them.
lacks    = $(firstword $(filter-out $(FOUND),$(NEEDS_$(1))))
runnable = $(foreach test,$(1),$(if $(call lacks,$(test)),,$(test)))
built    = $(addprefix $(BUILD)/,$(call runnable,$(1)))
tests    = $(foreach test,$(1),$(if $(call lacks,$(test)),'$(test)=echo $(patsubst $(call lacks,$(test))=%,%,$(filter $(call lacks,$(test))=%,$(PACKAGES))) is not installed; exit 77',$(BUILD)/$(test)))
SUPPORT  = $(call built,$(patsubst %.c,%,$(HELPERS) $(filter-out tests/extras/test_%,$(TLS) $(CURL) $(STORE))))

SUBMAKE   = $(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$(NPROC))
# Most tests wait more than they compute: at least four run at a time.
RUN_TESTS = MLFAB_BUILD=$(BUILD) $(PYTHON) tests/run.py --jobs $(shell expr $(NPROC) \* 2 \| 4)
# Each variant has seeds of its own (tests/sim/seeds.h): plain runs begin with 1. $(call seeds,2): from the second million.
seeds     = MLFAB_SEED_FIRST=$(1)000001
# Servers whose models are on devices that are played.
ON_DEVICE := tests/unit/test_model $(addprefix tests/sim/test_,consistency schedule servers failover)

#@ Tests
AFTER_DEPS := $(filter deps deps-check,$(MAKECMDGOALS))
# make looks for installed packages when it starts, so the tests run in a make that starts after deps.
test: $(AFTER_DEPS) ##: builds and runs the tests of all that a user depends on (5 minutes); T=worker: those with "worker" in their name
	@command -v $(PYTHON) >/dev/null || { echo 'make test: $(PYTHON) was not found; the tests are run by tests/run.py' >&2; exit 1; }
	$(if $(T),$(if $(strip $(SOME) $(SOME_SCRIPTS)),,@$(PYTHON) tests/run.py --unknown '$(T)' $(MAIN_TESTS) $(CHECK_TESTS) $(SCRIPTS)))
	+@$(SUBMAKE) $(if $(T),run-some,test-built)
	$(if $(T),,+@$(SUBMAKE) run-tests)
test-built: all $(call built,$(MAIN_TESTS)) $(SUPPORT) $(PROFILED)
run-tests:
	@$(RUN_TESTS) --lane test $(SCRIPTS) \
	  'amalgamation=$(PYTHON) amalgamate.py --check' 'symbols=tests/dropin/symbols.sh $(OBJECTS) $(SHARED)' \
	  'dropin=tests/dropin/dropin.sh quick' $(call tests,$(MAIN_TESTS)) \
	  $(foreach test,$(call runnable,$(ON_DEVICE)),'$(test) on devices=MLFAB_PLAYED=1 MLFAB_SCALE=0.2 $(call seeds,2) $(BUILD)/$(test)')

# Programs and scripts with a word in their name; a word with a / is part of a path.
named        = $(foreach test,$(1),$(if $(findstring $(T),$(if $(findstring /,$(T)),$(test),$(notdir $(test))).c),$(test)))
SOME         = $(call named,$(MAIN_TESTS) $(CHECK_TESTS))
SOME_SCRIPTS = $(call named,$(SCRIPTS))
run-some: $(if $(T),$(call built,$(SOME)) $(if $(SOME_SCRIPTS),all $(SUPPORT)) $(if $(filter %/figures_test.py %/sizes_test.py,$(SOME_SCRIPTS)),$(PROFILED)))
	@$(RUN_TESTS) $(SOME_SCRIPTS) $(call tests,$(SOME))

check: $(AFTER_DEPS) $(filter test,$(MAKECMDGOALS)) ##: guards a landing (12 minutes): sanitizers, planted bugs, drop-in, switches, fuzzers, MPI, launchers, format, tidy
	+@$(SUBMAKE) check-built
	+@$(SUBMAKE) run-check

ASAN := BUILD=$(BUILD)/asan CFLAGS='-O1 -g1 -fno-omit-frame-pointer' SAN='-fsanitize=address,undefined -fno-sanitize-recover=all'
TSAN := BUILD=$(BUILD)/tsan CFLAGS='-O1 -g1' SAN=-fsanitize=thread
# Tests with threads, or with memory shared between processes.
TSAN_TESTS := $(patsubst %.c,%,$(PUBLIC))
check-built: test-built $(BUILD)/bench $(call built,$(CHECK_TESTS)) mpi cblas-built gpu-built
	+@$(SUBMAKE) $(ASAN) sanitized FUZZ='$(FUZZERS:.c=)'
	+@$(SUBMAKE) $(TSAN) sanitized MAIN_TESTS='$(TSAN_TESTS)' CHECK_TESTS= FUZZ=
# Scripts that run under sanitizers, and the programs that these start.
SANITIZED := startup kill9
sanitized: $(addprefix $(BUILD)/,mlfab-run $(addprefix tests/process/,probe kill_worker mixer puller)) $(call built,$(MAIN_TESTS) $(CHECK_TESTS)) $(addprefix $(BUILD)/,$(FUZZ))

HAND_WRITTEN = $(OWN_HEADERS) $(wildcard core/*/*.[ch] transports/*.[ch] extras/*.[ch] tools/*.[ch] examples/*.[ch] tests/*/*.[ch]) \
               gpu/mlfab_gpu.h $(wildcard gpu/src/*.cu gpu/src/*.h tests/gpu/*.cu examples/*.cu)
in_asan = $(foreach test,$(call runnable,$(1)),'$(BUILD)/asan/$(test)@600=$(call seeds,3) MLFAB_SCALE=0.1 $(BUILD)/asan/$(test)')
in_tsan = '$(BUILD)/tsan/$(1) $(lastword $(subst =, ,$(2)))@900=$(call seeds,4) MLFAB_SCALE=0.05 $(2) tests/tsan.sh $(BUILD)/tsan/$(1)'
run-check:
	@$(RUN_TESTS) --lane check \
	  'planted bugs@900=$(PYTHON) tests/mutate.py planted --sample 8' 'tidy@900=tests/tidy.sh sample' \
	  'dropin@900=tests/dropin/dropin.sh' 'switches@600=tests/dropin/switches.sh' $(SCRIPTS) \
	  'format=command -v clang-format >/dev/null || { echo clang-format is not installed; exit 77; }; clang-format --dry-run -Werror $(HAND_WRITTEN)' \
	  $(call in_asan,$(MAIN_TESTS) $(CHECK_TESTS:tests/gpu/gpu_kernels=)) $(call tests,$(CHECK_TESTS)) \
	  $(foreach test,$(FUZZERS:.c=),'$(test)@200=MLFAB_FUZZ_SECONDS=3 $(BUILD)/asan/$(test)') \
	  'libfuzzer@600=command -v $(CLANG) >/dev/null || { echo $(CLANG) is not installed; exit 77; }; make --no-print-directory fuzz FUZZ_SECONDS=3' \
	  $(foreach test,$(call runnable,$(filter-out %/test_conform,$(TSAN_TESTS))),$(call in_tsan,$(test),)) \
	  $(foreach only,$(if $(call found,cmocka),tcp shm),$(call in_tsan,tests/conform/test_conform,CONFORM_ONLY=$(only))) \
	  $(foreach script,$(SANITIZED),$(foreach san,asan tsan,'$(san)/$(script)@900=MLFAB_BUILD=$(BUILD)/$(san) tests/tsan.sh $(PYTHON) tests/process/$(script)_test.py'))

soak: export MLFAB_SCALE := $(or $(MLFAB_SCALE),100)
soak: ##: the long tests in full length, all planted bugs, random mutants (hours); MLFAB_SCALE=1: a sample of the long tests
	+@$(SUBMAKE) test-built $(if $(filter 100,$(MLFAB_SCALE)),$(BUILD)/paper)
	@$(RUN_TESTS) --lane soak $(SCRIPTS) \
	  $(foreach test,$(call runnable,$(patsubst %.c,%,$(wildcard tests/sim/*.c tests/oom/*.c) $(addprefix tests/unit/test_,order.c replicate.c divergence.c distance.c shm_coll.c))),'$(test)@36000=$(call seeds,10) $(BUILD)/$(test)') \
	  $(if $(filter 100,$(MLFAB_SCALE)),'planted bugs@36000=$(PYTHON) tests/mutate.py planted' 'tidy@3600=tests/tidy.sh' 'switches@900=tests/dropin/switches.sh' \
	    'paper@3600=$(PYTHON) tests/paper/compare.py $(BUILD)/paper docs/paper.md' 'text@3600=$(PYTHON) tests/process/sizes_test.py text' \
	    "mutants@36000=CC='$(CC)' $(PYTHON) tests/mutate.py random --goal 0.8")

sim: $(call built,$(patsubst %.c,%,$(wildcard tests/sim/*.c))) ##: whole clusters in one process, from seeds (MLFAB_SCALE=1: a hundredth; 100: all of them)
	@$(RUN_TESTS) --timeout 36000 $^
dropin: ##: copies the generated files and their headers into an empty folder, and builds and runs a trainer there in many ways
switches: ##: compiles without each group that can be left out, and the profiles, and runs the smallest
dropin switches: all $(PROFILED)
	@$(RUN_TESTS) '$@@900=tests/dropin/$@.sh'

# libFuzzer instruments the files that decode, which is all that these programs link.
FUZZED := $(wildcard core/*/*_wire.c core/wire/*.c) $(addprefix core/,base/text.c base/error.c base/env.c base/rng.c base/random.c checkpoint/record.c \
          kernels/half.c kernels/kernels.c kernels/kernels_x86.c kernels/packet.c)
fuzz: ##: fuzzes the decoders of frames and packets with libFuzzer (clang), for FUZZ_SECONDS each (60)
	+@$(SUBMAKE) BUILD=$(BUILD)/libfuzzer CC='$(CLANG)' CFLAGS='-O1 -g1' SAN='-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all' \
	  LDFLAGS=-fsanitize=fuzzer PARTS='$(FUZZED:%.c=$(BUILD)/libfuzzer/%.o)' $(FUZZERS:%.c=$(BUILD)/libfuzzer/%)
	@for f in $(FUZZERS:.c=); do mkdir -p $(BUILD)/libfuzzer/$$f.corpus; \
	  $(BUILD)/libfuzzer/$$f -max_total_time=$${FUZZ_SECONDS:-60} -print_final_stats=1 $(BUILD)/libfuzzer/$$f.corpus || exit 1; done

# ---- variants: MPI, cblas, CUDA
# $(call mpi_rules,name): build/mpi/NAME/, for one MPI library. Three parts ask for MLFAB_WITH_MPI; the rest is linked.
MPICC    = OMPI_CC='$(CC)' MPICH_CC='$(CC)' mpicc$(if $(filter-out default,$(1)),.$(1))
MPIFORT  = mpifort$(if $(filter-out default,$(1)),.$(1))
MPI_PROGRAMS = $(addprefix $(1)/,libmlfab_mpi.so linked plain world $(if $(call found,cmocka),conform apart held))
MPI_BENCHES  = $(addprefix $(1)/bench-collective_,ours mpi)
define mpi_rules
$(1)/%.o: %.c
	@mkdir -p $$(@D)
	$$(QUIET)$$(call MPICC,$(2)) $$(FLAGS) -DMLFAB_WITH_MPI=1 -c -o $$@ $$<
$(1)/tests/conform/test_conform.o: MORE = -DCONFORM_TCP=0 -DCONFORM_SHM=0 -DCONFORM_SIM=0 -DCONFORM_MPI=1
$(addprefix $(1)/,apart held world): $(1)/%: $(1)/tests/mpi/%.o
$(1)/conform: $(1)/tests/conform/test_conform.o
$(addprefix $(1)/,conform apart held): LIBS += -lcmocka
$(1)/plain $(1)/linked: $(1)/tests/mpi/plain.o
$(1)/linked: $(1)/libmlfab_mpi.so
$(1)/linked: LIBS += -Wl,-rpath,$(abspath $(1))
$(1)/libmlfab_mpi.so: $(1)/extras/mlfab_mpi.o extras/mlfab_mpi.map
$(1)/libmlfab_mpi.so: LIBS += -shared -Wl,-soname,libmlfab_mpi.so -Wl,--version-script=extras/mlfab_mpi.map
$(call MPI_BENCHES,$(1)): $(1)/bench-%: $(1)/tests/bench/%.o
$(filter-out %/plain %/linked,$(call MPI_PROGRAMS,$(1)) $(call MPI_BENCHES,$(1))): $(addprefix $(1)/,core/open/open.o core/open/build_info.o transports/mpi.o) $(LIBPARTS)
$(call MPI_PROGRAMS,$(1)) $(call MPI_BENCHES,$(1)):
	@$$(call MPICC,$(2)) $$(CFLAGS) $$(SAN) $$(LDFLAGS) -o $$@ $$(filter %.o %.a %.so,$$^) $$(LIBS)
$(1)/13_mpi: extras/mlfab.f90 examples/13_mpi.f90 $(addprefix $(1)/,core/open/open.o core/open/build_info.o transports/mpi.o) $(LIBPARTS)
	@cd $$(@D) && $$(call MPIFORT,$(2)) -std=f2008 -Wall -O2 -g -o 13_mpi $$(abspath $$^) $$(LDFLAGS) $$(LIBS)
mpi: $(call MPI_PROGRAMS,$(1)) $(if $(shell command -v $(call MPIFORT,$(2))),$(1)/13_mpi)
endef
$(foreach mpi,$(MPIS),$(eval $(call mpi_rules,$(BUILD)/mpi/$(mpi),$(mpi))))

#@ Variants
mpi: ##: build/mpi/*/ for each MPI library: libmlfab_mpi.so, the Fortran example, the programs of tests/mpi

BLAS_PROGRAMS := $(addprefix $(BUILD)/cblas/,mlfab-run 01_push_pull)
cblas-built: $(if $(CBLAS),$(BLAS_PROGRAMS))
$(BUILD)/cblas/%.o: %.c
	@mkdir -p $(@D)
	$(QUIET)$(CACHED) $(CC) $(FLAGS) -DMLFAB_WITH_CBLAS=1 $(CBLAS_FLAGS) -c -o $@ $<
$(BUILD)/tests/cblas/%.o: MORE = $(CBLAS_FLAGS)
$(BUILD)/cblas/mlfab-run: $(BUILD)/tools/mlfab-run.o
$(BUILD)/cblas/01_push_pull: $(BUILD)/examples/01_push_pull.o
$(BLAS_PROGRAMS): $(BLAS_PARTS) $(LIBPARTS)

# nvcc tells the toolkit's place. GPU_ARCHS: 80 is an A100, 90 an H100 or H200; PTX of the last serves later GPUs.
CUDA        = $(abspath $(shell $(NVCC) -dryrun -x cu -c /dev/null 2>&1 | sed -n 's/.* TOP=//p'))
GPU_ARCHS  ?= 80 90
GPU_FLAGS   = -std=c++17 -O3 $(foreach arch,$(GPU_ARCHS),-gencode arch=compute_$(arch),code=sm_$(arch)) \
              -gencode arch=compute_$(lastword $(GPU_ARCHS)),code=compute_$(lastword $(GPU_ARCHS)) -Xcompiler -Wall,-Wextra
GPU_LINK    = -L$(CUDA)/lib64 -Xlinker -rpath,$(CUDA)/lib64 -lcublas $(if $(findstring bench,$@),-Xlinker --wrap=cudaLaunchKernel) $(LIBS)
GPU_TESTS  := $(addprefix $(BUILD)/tests/gpu/gpu_,kernels bench fabric)
GPU_BUILT  := $(BUILD)/gpu/mlfab_gpu.o $(BUILD)/gpu/14_gpu $(GPU_TESTS)
# Tests without a GPU: devices and a runtime that are played, and the kernels' code on the CPU.
GPU_PLAYED := tests/gpu/gpu_attach $(patsubst %.c,%,$(wildcard tests/unit/test_device*.c tests/unit/test_resident.c tests/unit/test_gpu_elements.c tests/conform/test_device.c))
gpu-built: $(if $(NVCC),$(if $(SAN),,$(GPU_BUILT)))
$(BUILD)/gpu/mlfab_gpu.o: gpu/mlfab_gpu.cu gpu/mlfab_gpu.h mlfab.h mlfab_device.h
$(BUILD)/gpu/14_gpu: examples/14_gpu.cu
$(GPU_TESTS): $(BUILD)/%: %.cu gpu/src/elements.h tests/unit/play.h tests/unit/play_values.h
$(filter-out %.o,$(GPU_BUILT)): $(BUILD)/gpu/mlfab_gpu.o $(LIBRARY)
$(GPU_BUILT):
	@mkdir -p $(@D)
	$(if $(V),,@echo '  NVCC $@';)$(NVCC) $(GPU_FLAGS) -I. -o $@ $(filter %.cu %.o %.a,$^) $(if $(filter %.o,$@),-c,$(GPU_LINK))
$(BUILD)/tests/gpu/%.o: MORE = -isystem $(CUDA)/include
$(BUILD)/tests/gpu/gpu_attach: $(BUILD)/tests/gpu/gpu_attach.o gpu/src/device.cu gpu/mlfab_gpu.h $(LIBRARY)
	@$(CXX) -std=c++17 -Wall -Wextra $(CFLAGS) $(SAN) -I. -isystem $(CUDA)/include -x c++ -c -o $@.device.o gpu/src/device.cu
	@$(LINK) -o $@ $(filter %.o,$^) $@.device.o $(LIBRARY) -lcmocka -lstdc++ $(LIBS)

gpu: ##: builds gpu/, and its tests (nvcc; GPU_ARCHS="80 90")
	@[ -n '$(NVCC)' ] || { echo 'make gpu: nvcc was not found; name it: make NVCC=/usr/local/cuda/bin/nvcc gpu' >&2; exit 1; }
	+@$(SUBMAKE) tools gpu-built $(call built,$(GPU_PLAYED))
gpu-test: gpu ##: tests of gpu/ (those that need a GPU are skipped if there is none)
	@$(RUN_TESTS) $(call tests,$(GPU_PLAYED)) $(BUILD)/tests/gpu/gpu_kernels tests/process/gpu_test.py
gpu-bench: gpu ##: speed of the kernels beside a copy and cuBLAS; of pushes and allreduces of 100 MB; needs a GPU
	$(BUILD)/tests/gpu/gpu_bench
	$(BUILD)/mlfab-run -n 2 -s 1 $(BUILD)/tests/gpu/gpu_fabric --time 100

#@ Figures
# Benchmarks of internals link the parts; ranks of collectives and of partial allreduces are run by scripts.
PART_BENCHES  := $(addprefix $(BUILD)/bench-,plan filter version tagged kernels small)
RANK_BENCHES  := $(addprefix $(BUILD)/bench-,collective_ours eager_ranks eager_train collective_limit)
PEER_BENCHES  := $(if $(call found,mpi:%),$(BUILD)/bench-collective_mpi) $(if $(call found,gloo),$(BUILD)/bench-collective_gloo)
BENCH_OBJECTS := $(patsubst %.c,$(BUILD)/%.o,$(filter-out $(patsubst $(BUILD)/bench-%,tests/bench/%.c,$(PART_BENCHES)) \
                   tests/bench/collective_% tests/bench/eager_%,$(wildcard tests/bench/*.c)))
$(BUILD)/tests/bench/%.o: MORE = $(if $(call found,zmq),,-DMLFAB_BENCH_ZMQ=0) $(if $(TLS_LIBS),,-DMLFAB_BENCH_TLS=0) $(CBLAS_FLAGS)
$(BUILD)/bench: $(BENCH_OBJECTS) $(if $(TLS_LIBS),$(BUILD)/libmlfab_tls.a) $(LIBRARY)
$(BUILD)/bench: LIBS += $(if $(call found,zmq),-lzmq) $(TLS_LIBS)
$(BUILD)/bench-kernels: $(if $(CBLAS),$(BLAS_PARTS))
$(PART_BENCHES) $(BLAS_PROGRAMS): LIBS += $(CBLAS_LIBS)
$(PART_BENCHES): $(LIBPARTS)
$(RANK_BENCHES): $(LIBRARY)
$(PART_BENCHES) $(RANK_BENCHES): $(BUILD)/bench-%: $(BUILD)/tests/bench/%.o
$(BUILD)/bench-collective_mpi: tests/bench/collective_mpi.c tests/bench/collective_common.h
	$(QUIET)OMPI_CC='$(CC)' mpicc -std=c11 $(CFLAGS) -o $@ $< $(LDFLAGS)
$(BUILD)/bench-collective_gloo: tests/bench/collective_gloo.cc tests/bench/collective_common.h
	$(QUIET)$(CXX) -Wall -Wextra $(CFLAGS) -o $@ $< $(LDFLAGS) -lgloo -lpthread
bench: $(AFTER_DEPS) ##: measures against memcpy, sockets, ZeroMQ, Open MPI, Gloo, OpenBLAS and a paper: a table, build/bench.tsv, the goals met
	+@$(SUBMAKE) $(BUILD)/bench $(PART_BENCHES) $(RANK_BENCHES) $(PEER_BENCHES) $(foreach mpi,$(filter-out default,$(MPIS)),$(call MPI_BENCHES,$(BUILD)/mpi/$(mpi))) tools examples
	$(BUILD)/bench $(BUILD)/bench.tsv
	for program in $(PART_BENCHES); do $$program $(BUILD)/bench.tsv || exit 1; done
	for script in collective eager train train_eager; do $(PYTHON) tests/bench/$$script.py $(BUILD) $(BUILD)/bench.tsv || exit 1; done
	$(PYTHON) tests/bench/goals.py $(BUILD)/bench.tsv

# The conditions of consistency are not in the public header, so this program links the parts.
$(BUILD)/paper: $(patsubst %.c,$(BUILD)/%.o,$(wildcard tests/paper/*.c)) $(LIBPARTS)
$(TOOLS) $(BLAS_PROGRAMS) $(BUILD)/bench $(PART_BENCHES) $(RANK_BENCHES) $(BUILD)/paper:
	@$(LINK) -o $@ $(filter %.o,$^) $(filter %.a,$^) $(LIBS)
paper: $(AFTER_DEPS) ##: MLfabric's, FluentPS's, TDF's, eagerSGD's and ASAP's evaluation, beside their figures: build/paper.tsv, docs/paper.md
	+@$(SUBMAKE) $(BUILD)/paper
	$(BUILD)/paper $(BUILD)/paper.tsv docs/paper.md
plots: $(BUILD)/mlfab-run $(addprefix $(BUILD)/examples/,05_scheduling 06_consistency 07_filters 12_server_dies) ##: draws docs/img (gnuplot)
	$(PYTHON) tools/plots.py $(BUILD)

#@ Install and others
DEPS       := libcmocka-dev libssl-dev libcurl4-openssl-dev pkg-config
DEPS_CHECK := libsodium-dev libzmq3-dev libgloo-dev clang clang-format clang-tidy cmake g++ iproute2 musl-tools libopenmpi-dev \
              openmpi-bin libmpich-dev mpich gfortran libopenblas-dev openssl nginx libnginx-mod-http-dav-ext prometheus tmux \
              prometheus-node-exporter prometheus-pushgateway slurmctld slurmd slurm-client munge python3-yaml gnuplot-nox
deps: ##: installs the packages that make test needs (apt, as root)
	@tests/packages.sh $(DEPS)
deps-check: ##: installs the packages that make check and make bench need
	@tests/packages.sh $(DEPS) $(DEPS_CHECK)

INSTALL = install
LIBDIR ?= $(PREFIX)/lib
OWN_HEADERS = $(addprefix mlfab,.h _transport.h _partial.h _device.h _node.h _sim.h)
HEADERS   = $(OWN_HEADERS) $(patsubst $(BUILD)/lib%.a,extras/%.h,$(EXTRAS))
INSTALLER = $(foreach name,BUILD DESTDIR PREFIX LIBDIR VERSION HEADERS TOOLS EXTRAS MPIS INSTALL PYTHON,$(name)='$($(name))') tools/install.sh
install: libraries tools extras $(MPIS:%=$(BUILD)/mpi/%/libmlfab_mpi.so) ##: headers, libraries (libmlfab_mpi.so with MPI), pkg-config and CMake files, tools, man pages, completion, under DESTDIR/PREFIX (/usr/local)
	@$(INSTALLER) install
uninstall: ##: removes what install put there
	@$(INSTALLER) uninstall
clean: ##: removes build/
	rm -rf $(BUILD)

help: ##: this list
	@awk '/^#@ / { print "\n" substr($$0, 4) } \
	  /^[a-z-]+:.* ##: / { name = text = $$0; sub(/:.*/, "", name); sub(/.* ##: /, "", text); printf "  make %-11s %s\n", name, text }' Makefile
	@echo; echo 'Found here (make deps-check installs the others, but for nvcc and torchrun):'
	@printf '  %-24s %s\n' MPI '$(or $(MPIS),-)' cblas '$(or $(CBLAS),-)' OpenSSL '$(or $(call found,tls),-)' libcurl '$(or $(call found,curl),-)' \
	  cmocka '$(if $(call found,cmocka),yes,-)' ZeroMQ '$(or $(call found,zmq),-)' Gloo '$(or $(call found,gloo),-)' ccache '$(or $(call found,ccache),-)' \
	  nvcc '$(or $(NVCC),-)' $(foreach program,gfortran nginx $(filter prometheus%,$(DEPS_CHECK)) promtool slurmctld torchrun,$(program) '$(or $(shell PATH="$$PATH:/usr/sbin:/sbin"; command -v $(program)),-)')
	@[ ! -x $(BUILD)/mlfab-run ] || { echo 'Built:'; echo "  $$($(BUILD)/mlfab-run --version)"; }

.PHONY: always all libraries tools examples extras amalgamate demo test test-built run-tests run-some check check-built sanitized run-check soak sim \
        dropin switches fuzz mpi cblas-built gpu gpu-built gpu-test gpu-bench bench paper plots deps deps-check install uninstall clean help

-include $(shell find $(BUILD) -name '*.d' -not -path '$(BUILD)/*san/*' -not -path '$(BUILD)/libfuzzer/*' -not -path '$(BUILD)/mutate/*' 2>/dev/null)
