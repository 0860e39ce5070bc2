/* collective_gloo.cc - Gloo's allreduce over TCP: bench-collective-gloo RANKS ALGORITHM DIR
 *
 * ALGORITHM: ring, bcube, halving-doubling. Ranks are not bound to a core each: Gloo has an I/O
 * thread beside the caller's. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <csignal>
#include <exception>
#include <memory>
#include <string>

#include "collective_common.h"

namespace {

struct Gloo {
  std::shared_ptr<gloo::rendezvous::Context> context;
  std::string algorithm;
  std::unique_ptr<gloo::AllreduceHalvingDoubling<float>> doubling;
  std::unique_ptr<gloo::AllreduceOptions> options;
};

void prepare(collective_rank *r, size_t count) {
  auto *self = static_cast<Gloo *>(r->self);
  if (self->algorithm == "halving-doubling") {
    self->doubling.reset(new gloo::AllreduceHalvingDoubling<float>(
        self->context, std::vector<float *>{r->data}, static_cast<int>(count)));
    return;
  }
  self->options.reset(new gloo::AllreduceOptions(self->context));
  self->options->setOutput(r->data, count);
  self->options->setReduceFunction([](void *sum, const void *a, const void *b, size_t n) {
    gloo::sum<float>(sum, a, b, n);
  });
  self->options->setAlgorithm(self->algorithm == "bcube"
                                  ? gloo::AllreduceOptions::Algorithm::BCUBE
                                  : gloo::AllreduceOptions::Algorithm::RING);
}

void allreduce(collective_rank *r, size_t) {
  auto *self = static_cast<Gloo *>(r->self);
  if (self->doubling) {
    self->doubling->run();
  } else {
    gloo::allreduce(*self->options);
  }
}

void play(int rank, int ranks, const char *algorithm, const char *dir) {
  Gloo self;
  collective_rank r = {rank, ranks, nullptr, &self, prepare, allreduce};
  gloo::transport::tcp::attr attribute("127.0.0.1");
  auto device = gloo::transport::tcp::CreateDevice(attribute);
  gloo::rendezvous::FileStore store(dir);
  self.algorithm = algorithm;
  self.context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
  self.context->connectFullMesh(store, device);
  r.data = collective_memory();
  collective_serve(&r, dir);
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 4) collective_fail("usage", "bench-collective-gloo RANKS ALGORITHM DIR");
  int ranks = atoi(argv[1]), rank = 0;
  for (int i = 1; i < ranks && rank == 0; i++) {
    if (fork() == 0) rank = i;
  }
  if (rank > 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    play(rank, ranks, argv[2], argv[3]);
  } catch (const std::exception &e) {
    collective_fail("bench-collective-gloo", e.what());
  }
  while (rank == 0 && wait(nullptr) > 0) continue;
  _exit(0);
}
