/* slow.c - a worker and a server over a slow link.
 *
 *   slow FLOATS
 *
 * Its place in the fabric comes from MLFAB_* variables. The worker gives first weights, pushes twice, and pulls; it prints
 *   sent BYTES reconnects N */
#include "node.h"

static int work(uint64_t count) {
  mlfab_stats stats;
  float *data = zeros(count, sizeof *data);
  const mlfab_buf buf = {MLFAB_ALL, 0, data, count};
  must("tensor", mlfab_tensor_add(fabric, 0, MLFAB_F32, count));
  must("model_start", mlfab_model_start(fabric, NULL, &buf, 1));
  for (int i = 0; i < 2; i++) must("push", mlfab_push(fabric, &buf, 1, NULL, NULL));
  must("pull", mlfab_pull(fabric, &buf, 1, NULL, NULL));
  must("stats", mlfab_get_stats(fabric, &stats, sizeof stats));
  printf("sent %llu reconnects %llu\n", (unsigned long long)stats.bytes_sent,
         (unsigned long long)stats.reconnects);
  free(data);
  return 0;
}

int main(int argc, char **argv) {
  mlfab_config config;
  if (argc != 2) return 2;
  configure(&config);
  open_node(&config);
  return close_node(config.roles == MLFAB_ROLE_SERVER ? mlfab_serve(fabric, 0)
                                                      : work(strtoull(argv[1], NULL, 10)));
}
