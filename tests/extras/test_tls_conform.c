/* test_tls_conform.c - TLS against the suite that every transport has to pass (tests/conform/conform.h), with a new key
 * every few records. */
#define _GNU_SOURCE 1
#include <openssl/ssl.h>

#define TLS_RECORDS 37
static long updates;
static int counted_update(SSL *ssl, int kind) {
  int done = SSL_key_update(ssl, kind);
  updates += done;
  return done;
}
#define SSL_key_update counted_update
#include "../../extras/mlfab_tls.c"

#include "../conform/conform.h"
#include "tls_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>

/* --- a stranger that speaks TLS, so that the suite can say wrong things inside -------------------- */

typedef struct relay {
  int plain, wire;
} relay;

/* Copies between a plain socket and TLS until one of them ends. */
static void *relay_run(void *argument) {
  relay r = *(relay *)argument;
  free(argument);
  sigset_t pipes; /* OpenSSL writes to its socket as it likes */
  sigemptyset(&pipes);
  sigaddset(&pipes, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipes, NULL);
  tls_client client;
  tls_client_open(&client, CONFORM_KEY);
  SSL *ssl = tls_client_connect(&client, r.wire);
  char data[4096];
  int going = ssl != NULL, ended = 0;
  while (going) {
    struct pollfd ends[2] = {{.fd = ended ? -1 : r.plain, .events = POLLIN},
                             {.fd = r.wire, .events = POLLIN}};
    poll(ends, 2, 10000);
    if (ends[0].revents) {
      ssize_t n = read(r.plain, data, sizeof data);
      if (n > 0) going = SSL_write(ssl, data, (int)n) == n;
      if (n <= 0) ended = 1, going = SSL_shutdown(ssl) >= 0 && shutdown(r.wire, SHUT_WR) == 0;
    }
    if (ends[1].revents) {
      int n = SSL_read(ssl, data, sizeof data);
      going = n > 0 && (ended || send(r.plain, data, (size_t)n, MSG_NOSIGNAL) == n);
    }
    if (!ends[0].revents && !ends[1].revents) going = 0;
  }
  SSL_free(ssl);
  tls_client_close(&client);
  close(r.wire);
  close(r.plain);
  return NULL;
}

static int wire_connect(const char *address) {
  struct sockaddr_in v4 = {.sin_family = AF_INET};
  struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
  int is6 = strstr(address, "[::1]") != NULL;
  uint16_t port = htons((uint16_t)strtoul(strrchr(address, ':') + 1, NULL, 10));
  const void *to = is6 ? (const void *)&v6 : (const void *)&v4;
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  v4.sin_port = v6.sin6_port = port;
  int fd = socket(is6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int one = 1;
  if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (fd >= 0 && !connect(fd, to, is6 ? sizeof v6 : sizeof v4)) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

/* Relays that were started. A thread that lives on when main has returned leaves what OpenSSL keeps for it. */
static pthread_t relays[4096];
static size_t relay_count;

static void relays_join(void) {
  for (size_t i = 0; i < relay_count; i++) pthread_join(relays[i], NULL);
  relay_count = 0;
}

static int tls_stranger(const char *address) {
  int ends[2];
  relay *r = malloc(sizeof *r);
  if (!r || strncmp(address, "tls:", 4) != 0) abort();
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) abort();
  r->plain = ends[1];
  r->wire = wire_connect(address);
  if (r->wire < 0 || relay_count == 4096 ||
      pthread_create(&relays[relay_count], NULL, relay_run, r))
    abort();
  relay_count++;
  return ends[0];
}

static void tls6_listen(conform_world *world, int i, char *address) {
  (void)world, (void)i;
  snprintf(address, 256, "tls:[::1]:0");
}

static int have_ipv6(void) {
  struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
  int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int bound = fd >= 0 && !bind(fd, (const struct sockaddr *)(const void *)&v6, sizeof v6);
  if (fd >= 0) close(fd);
  return bound;
}

int main(void) {
  conform_transport list[2];
  memset(list, 0, sizeof list);
  signal(SIGPIPE, SIG_DFL); /* the transport raises none */
  list[0] = (conform_transport){
      .name = "tls",
      .table = mlfab_transport_tls(),
      .missing = "not compiled in",
      .flags = CONFORM_SOCKETS | CONFORM_WAITS | CONFORM_ALONE, /* counts keys */
      .stranger = tls_stranger};
  list[1] = list[0];
  list[1].name = "tls6";
  list[1].missing = "no IPv6 here";
  list[1].table = have_ipv6() ? list[0].table : NULL;
  list[1].listen = tls6_listen;
  const char *only = getenv("CONFORM_ONLY");
  size_t first = only && !strcmp(only, "tls6"), n = only ? 1 : 2;
  int failed = conform_run(&list[first], n);
  relays_join();
  printf("# %ld new keys\n", updates);
  return failed || (list[0].table && updates < 100);
}
