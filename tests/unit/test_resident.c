/* test_resident.c - a server whose model is in memory of a device: it has the bits of one on the host, and every failure of the
 * device ends it like a crash, with the device's words, or is a want of memory, after which it goes on.
 *
 * The device is played (played_model.h). With MLFAB_PLAYED=1 in the environment test_model and the simulations run on such
 * devices, too: see `make test`. */
#include "played_model.h"

#include "said.h"
#include "../testing.h"

enum { COUNT = 3000, STEPS = 12, WORKERS = 2 };

/* What workers saw of a training. */
typedef struct story {
  int code; /* of the first call that failed */
  mlfab_error error;
  uint32_t steps; /* that had been pulled before */
  float w[STEPS][COUNT];
} story;

static void open_world(world *w, played *device, uint32_t replicas) {
  world_init(w, WORKERS, 1, 1);
  w->config.timeout_ns = 10ull * WORLD_S;
  w->config.block_bytes = 1024;
  w->config.chunk_bytes = 512;
  w->config.replicas = replicas;
  if (device) w->config.device = &played_model_device;
  w->config.device_self = device;
  world_open(w, 7);
}

/* A worker and a server whose model is on the device, with one tensor. */
static void open_one(world *w, played *device, uint32_t dedicated, uint64_t count) {
  world_init(w, 1, 1, dedicated);
  w->config.timeout_ns = 10ull * WORLD_S;
  w->config.device = &played_model_device;
  w->config.device_self = device;
  world_open(w, 1);
  OK(w->node[0], mlfab_tensor_add(w->node[0], 1, MLFAB_F32, count));
}

static int step(world *w, uint32_t rank, uint32_t optimizer, float *got, uint64_t round) {
  static float u[COUNT];
  mlfab *node = w->node[rank];
  const mlfab_buf update = {1, 0, u, COUNT}, all = {1, 0, got, COUNT};
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  for (uint32_t i = 0; i < COUNT; i++) u[i] = (float)((i * 7 + round * 13 + rank) % 101) / 64.0f;
  options.scale = optimizer == MLFAB_OPTIMIZER_SGD ? -0.125 : 0.01;
  int code = mlfab_push(node, &update, 1, &options, NULL);
  return code ? code : mlfab_pull(node, &all, 1, NULL, NULL);
}

/* Both workers in turn, until something fails. */
static void train(world *w, uint32_t optimizer, story *s) {
  static float first[COUNT];
  mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
  options.optimizer = optimizer;
  memset(s, 0, sizeof *s);
  for (uint32_t i = 0; i < COUNT; i++) first[i] = (float)(i % 17);
  const mlfab_buf all = {1, 0, first, COUNT};
  for (uint32_t rank = 0; rank < WORKERS && !s->code; rank++) {
    s->code = mlfab_tensor_add(w->node[rank], 1, MLFAB_F32, COUNT);
    if (!s->code) s->code = mlfab_model_start(w->node[rank], &options, &all, 1);
    if (s->code) mlfab_last_error(w->node[rank], &s->error);
  }
  for (s->steps = 0; s->steps < STEPS && !s->code;) {
    const uint32_t rank = s->steps % WORKERS;
    s->code = step(w, rank, optimizer, s->w[s->steps], s->steps);
    if (s->code)
      mlfab_last_error(w->node[rank], &s->error);
    else
      s->steps++;
  }
}

static const uint32_t optimizers[] = {MLFAB_OPTIMIZER_SGD, MLFAB_OPTIMIZER_MOMENTUM,
                                      MLFAB_OPTIMIZER_ADAM};

/* What a model on the host is. */
static const story *on_host(uint32_t k) {
  static story known[MLFAB_OPTIMIZER_ADAM + 3];
  if (known[k].steps == 0) {
    world w;
    open_world(&w, NULL, 0);
    train(&w, optimizers[k], &known[k]);
    assert_int_equal(known[k].code, 0);
    world_close(&w);
  }
  return &known[k];
}

static void same_until(const story *got, const story *want) {
  for (uint32_t i = 0; i < got->steps; i++)
    assert_memory_equal(got->w[i], want->w[i], sizeof want->w[i]);
}

TEST(test_same_bits) {
  static story got;
  for (uint32_t k = 0; k < 3; k++) {
    world w;
    played *device = played_model_begin(k + 1);
    open_world(&w, device, 0);
    train(&w, optimizers[k], &got);
    assert_int_equal(got.code, 0);
    same_until(&got, on_host(k));
    world_close(&w);
    assert_true(device->calls[k ? PLAYED_STEP : PLAYED_ADD] >= STEPS * COUNT * 4 / 1024);
    /* Two blocks for each, a few spare ones, and the states. */
    const uint64_t states = k, blocks = (COUNT * 4 + 1023) / 1024;
    assert_true(device->model->most <=
                MLFAB_DEVICE_STAGE + (5 + states) * blocks * 1024 + 8 * 1024);
    played_model_end(device);
  }
}

/* What a server said that has ended by itself. */
static int server_ended(world *w, mlfab_error *error) {
  int code = mlfab_progress(w->node[WORKERS], 0);
  if (code < 0) mlfab_last_error(w->node[WORKERS], error);
  return code < 0 ? code : 0;
}

/* The k-th call of each function fails. */
TEST(test_failures) {
  static story got;
  static const int functions[] = {PLAYED_TAKE,  PLAYED_STAGE, PLAYED_ZERO, PLAYED_ADD, PLAYED_STEP,
                                  PLAYED_AFTER, PLAYED_COPY,  PLAYED_MARK, PLAYED_PIN};
  uint32_t ended[PLAYED_LAST] = {0}, poor[PLAYED_LAST] = {0};
  for (uint32_t f = 0; f < sizeof functions / sizeof *functions; f++) {
    const int function = functions[f];
    for (uint32_t k = 1, over = 0; !over && k < 200; k += 1 + k / 4) {
      world w;
      mlfab_error error = {.code = 0};
      played *device = played_model_begin(k);
      const uint32_t which = function == PLAYED_ADD ? 0 : 2;
      open_world(&w, device, 0);
      device->fails = function;
      device->fails_at = device->calls[function] + k;
      device->fails_for = 1;
      train(&w, optimizers[which], &got);
      same_until(&got, on_host(which));
      over = device->calls[function] < device->fails_at;
      int code = server_ended(&w, &error);
      if (over) assert_true(!got.code && !code);
      if (code) {
        assert_int_equal(code, MLFAB_ERR_DEVICE);
        if (!strstr(error.text, "played 7")) fail_msg("it said: %s", error.text);
        assert_true(got.code != 0);
        ended[function]++;
      } else if (got.code) { /* there was no memory: it goes on */
        assert_int_equal(got.code, MLFAB_ERR_MEMORY);
        poor[function]++;
        if (function == PLAYED_PIN) {
          const mlfab_buf all = {1, 0, got.w[0], COUNT};
          OK(w.node[0], mlfab_pull(w.node[0], &all, 1, NULL, NULL));
        }
      }
      world_close(&w);
      device->lost |= code != 0;
      played_model_end(device);
    }
    if (function == PLAYED_TAKE || function == PLAYED_PIN)
      assert_true(poor[function] > 0 && !ended[function]);
    else
      assert_true(ended[function] > 2);
  }
}

/* The device is lost in the middle, or stops: nobody gets a wrong model, and nobody hangs. */
TEST(test_lost) {
  static story got;
  for (uint32_t k = 0; k < 30; k++) {
    world w;
    mlfab_error error;
    played *device = played_model_begin(k + 1);
    open_world(&w, device, 0);
    device->copy_fails_at = 20 + 17 * k; /* a copy that is under way */
    train(&w, MLFAB_OPTIMIZER_ADAM, &got);
    same_until(&got, on_host(2));
    if (got.code) assert_int_equal(server_ended(&w, &error), MLFAB_ERR_DEVICE);
    played_lose(device);
    mlfab_sim_run(w.sim, WORLD_S);
    world_close(&w);
    played_model_end(device);
  }
}

/* Models and configurations that a device cannot hold. */
static int refuses(void *user, const mlfab_update_info *info, uint32_t tensor, int dtype,
                   uint64_t first, uint64_t count, void *w, const void *u) {
  (void)user, (void)info, (void)tensor, (void)dtype, (void)first, (void)count, (void)w, (void)u;
  return 0;
}

TEST(test_refused) {
  for (int k = 0; k < 4; k++) {
    world w;
    float first[8] = {0};
    const mlfab_buf all = {1, 0, first, 8};
    mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
    played *device = played_model_begin(1);
    if (k == 0) options.tags = 16;
    if (k == 1) options.pull_half = MLFAB_HALF_BF16;
    if (k == 2) options.change_threshold = 0.5;
    world_init(&w, 1, 1, 1);
    w.config.device = &played_model_device;
    w.config.device_self = device;
    if (k == 3) w.config.on_update = refuses;
    world_open(&w, 1);
    OK(w.node[0], mlfab_tensor_add(w.node[0], 1, MLFAB_F32, 8));
    REFUSED(w.node[0], mlfab_model_start(w.node[0], &options, &all, 1), MLFAB_ERR_UNSUPPORTED,
            "whose model is on a device");
    world_close(&w);
    played_model_end(device);
  }
  mlfab_device poor = played_model_device;
  mlfab_config config;
  mlfab_error error;
  mlfab *ctx = NULL;
  mlfab_config_init(&config);
  config.device = &poor;
  poor.step = NULL;
  assert_int_equal(mlfab_open(&config, &ctx, &error), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "device.step is not set"));
  poor.size = 8;
  assert_int_equal(mlfab_open(&config, &ctx, &error), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "device.size is not set"));
}

/* Without enough device memory the model is refused, and a smaller one is not. */
TEST(test_out_of_memory) {
  world w;
  static float first[COUNT];
  const mlfab_buf all = {1, 0, first, COUNT};
  played *device = played_model_begin(1);
  device->model->limit = MLFAB_DEVICE_STAGE + 2 * COUNT * 4;
  open_one(&w, device, 1, COUNT);
  assert_int_equal(mlfab_model_start(w.node[0], NULL, &all, 1), MLFAB_ERR_MEMORY);
  device->model->limit = 0;
  OK(w.node[0], mlfab_model_start(w.node[0], NULL, &all, 1));
  world_close(&w);
  played_model_end(device);
}

/* A worker that is the server, too: nobody waits for updates that nobody will decide. */
TEST(test_flush) {
  world w;
  static float first[COUNT];
  const mlfab_buf all = {1, 0, first, COUNT};
  played *device = played_model_begin(1);
  open_one(&w, device, 0, COUNT);
  OK(w.node[0], mlfab_model_start(w.node[0], NULL, &all, 1));
  const uint64_t began = mlfab_sim_clock(w.sim);
  played_lose(device);
  int code = 0;
  for (int k = 0; k < 3 && !code; k++) code = mlfab_push_start(w.node[0], &all, 1, NULL, NULL);
  REFUSED(w.node[0], mlfab_flush(w.node[0], 0), MLFAB_ERR_DEVICE,
          "its model is on a device, which has failed");
  assert_true(mlfab_sim_clock(w.sim) - began < WORLD_S);
  world_close(&w);
  played_model_end(device);
}

TESTS(NULL, NULL)
