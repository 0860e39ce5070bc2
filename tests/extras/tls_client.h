/* tls_client.h - a process that speaks TLS with a fabric's key, written against OpenSSL and RFC 5869 alone, so that what
 * extras/mlfab_tls.c derives from a key is compared with a second implementation. */
#ifndef MLFAB_TLS_CLIENT_H
#define MLFAB_TLS_CLIENT_H

#include <openssl/hmac.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct tls_client {
  SSL_CTX *context;
  uint8_t psk[32];
  char identity[23];
} tls_client;

static void tls_client_hmac(const void *key, size_t key_bytes, const void *data, size_t bytes,
                            uint8_t out[32]) {
  unsigned n = 32;
  HMAC(EVP_sha256(), key, (int)key_bytes, data, bytes, out, &n);
}

/* HKDF with one block of output. */
static void tls_client_derive(const char *key, const char *info, uint8_t out[32]) {
  uint8_t extracted[32], message[64];
  size_t n = strlen(info);
  tls_client_hmac("mlfab tls", 9, key, strlen(key), extracted);
  memcpy(message, info, n);
  message[n] = 1;
  tls_client_hmac(extracted, 32, message, n + 1, out);
}

static int tls_client_use(SSL *ssl, const EVP_MD *md, const unsigned char **id, size_t *bytes,
                          SSL_SESSION **psk) {
  static const unsigned char suite[2] = {0x13, 0x01};
  tls_client *client = SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl));
  (void)md;
  *psk = SSL_SESSION_new();
  SSL_SESSION_set1_master_key(*psk, client->psk, sizeof client->psk);
  SSL_SESSION_set_cipher(*psk, SSL_CIPHER_find(ssl, suite));
  SSL_SESSION_set_protocol_version(*psk, TLS1_3_VERSION);
  *id = (const unsigned char *)client->identity;
  *bytes = strlen(client->identity);
  return 1;
}

static void tls_client_open(tls_client *client, const char *key) {
  uint8_t name[32];
  tls_client_derive(key, "psk", client->psk);
  tls_client_derive(key, "identity", name);
  snprintf(client->identity, sizeof client->identity, "mlfab-");
  for (int i = 0; i < 8; i++) snprintf(client->identity + 6 + 2 * i, 3, "%02x", name[i]);
  client->context = SSL_CTX_new(TLS_client_method());
  if (!client->context) abort();
  SSL_CTX_set_app_data(client->context, client);
  SSL_CTX_set_psk_use_session_callback(client->context, tls_client_use);
}

static void tls_client_close(tls_client *client) { SSL_CTX_free(client->context); }

/* A connection of this client: NULL when the handshake fails. `fd` is blocking, and stays the caller's. */
static SSL *tls_client_connect(tls_client *client, int fd) {
  SSL *ssl = SSL_new(client->context);
  SSL_set_fd(ssl, fd);
  if (SSL_connect(ssl) == 1) return ssl;
  SSL_free(ssl);
  return NULL;
}

#endif
