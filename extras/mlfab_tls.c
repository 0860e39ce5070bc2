/* mlfab_tls.c - implements TLS 1.3 by pre-shared key, with OpenSSL, as a layer of the TCP transport. See mlfab_tls.h.
 *
 * It encrypts, with forward secrecy. It does not use certificates, tickets, early data, or other versions of TLS, and
 * has no other sockets than those that TCP gives it.
 *
 * Of each key's text k:
 *
 *    PSK      = HKDF-SHA256(k; salt "mlfab tls", info "psk")        32 bytes
 *    identity = "mlfab-" and HKDF-SHA256(k; ..., info "identity")   8 bytes in hex, sent in clear
 *
 * A session is in one of these states:
 *
 *    WAITS   called, and its ClientHello is not there. It has no SSL object.   -> SHAKES, failed
 *    SHAKES  OpenSSL's handshake                                               -> OPEN, failed
 *    OPEN    carries bytes                                                     -> failed
 *
 * Invariants
 *  (1) A called session gets an SSL object (about 45 KB) only when a whole ClientHello of at most TLS_HELLO_MOST bytes
 *      is there that contains an identity of ours. Until then it costs its struct, less than 128 bytes. OpenSSL ends
 *      the handshake in the same call if the hello's binder was not made with the PSK. So a process without the key can
 *      keep an SSL object only by repeating a recorded hello, as long as TCP lets a stranger live; TCP limits the
 *      number of strangers.
 *  (2) A handshake counts only if it used the PSK (SSL_session_reused): a certificate is no proof.
 *  (3) A refused send is repeated with the same first bytes, as TCP's queue guarantees, at any address.
 *  (4) No key encrypts more than TLS_RECORDS records of at most 16 KiB (RFC 8446 5.5 allows 2^24.5 with AES-GCM).
 *  (5) A session that has failed stays so.
 *
 * A pre-shared key proves membership, but not identity: an attacker may lead a member's call to another member, or back
 * to itself. The proofs inside (core/keys/guard.h) cover numbers and roles, and detect that.
 *
 * Source: RFC 8446; RFC 9257 (external PSKs). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "mlfab_tls.h"
#include "mlfab_transport.h"

#include <errno.h>
#include <openssl/err.h>
#include <openssl/kdf.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#ifndef TLS_RECORDS
#define TLS_RECORDS (1u << 23)
#endif
#ifdef MSG_NOSIGNAL
#define TLS_FLAGS (MSG_NOSIGNAL | MSG_DONTWAIT)
#else
#define TLS_FLAGS MSG_DONTWAIT
#endif

enum {
  TLS_HELLO_MOST = 1024,
  TLS_RECORD_BYTES = 16384,
  TLS_READ_BYTES = 68 << 10, /* limit of one read from the socket */
  TLS_KEY_LEAST = 16,
  TLS_IDENTITY_BYTES = 22,
  TLS_ALERT_VERSION = 70,
  TLS_ALERT_IDENTITY = 115
};

typedef struct tls_key {
  SSL_SESSION *session; /* OpenSSL's form of a PSK */
  char identity[TLS_IDENTITY_BYTES + 1];
} tls_key;

typedef struct tls_user {
  mlfab_env env;
  SSL_CTX *context;
  BIO_METHOD *method;
  tls_key keys[2]; /* the first is for own calls, both are accepted */
  uint32_t count;
} tls_user;

typedef struct tls_session {
  tls_user *user;
  SSL *ssl; /* NULL: it waits */
  int fd;
  int failed; /* errno of send and receive from now on; 0: none */
  int number; /* errno of the last system call */
  uint32_t attempt, records;
  uint8_t called, open, ended, finished; /* ended: the peer's bytes have ended */
  const char *why;
} tls_session;

/* --- the socket for OpenSSL ------------------------------------------------------------------- */

static int tls_bio_done(BIO *bio, tls_session *session, ssize_t n, int again) {
  BIO_clear_retry_flags(bio);
  if (n >= 0) return (int)n;
  session->number = errno;
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOBUFS)
    BIO_set_flags(bio, again | BIO_FLAGS_SHOULD_RETRY);
  return -1;
}

static int tls_bio_write(BIO *bio, const char *data, int bytes) {
  tls_session *session = BIO_get_data(bio);
  return tls_bio_done(bio, session, send(session->fd, data, (size_t)bytes, TLS_FLAGS),
                      BIO_FLAGS_WRITE);
}

static int tls_bio_read(BIO *bio, char *data, int room) {
  tls_session *session = BIO_get_data(bio);
  ssize_t n = recv(session->fd, data, (size_t)room, MSG_DONTWAIT);
  if (n == 0 || (n < 0 && errno == ECONNRESET)) session->ended = 1;
  return tls_bio_done(bio, session, n, BIO_FLAGS_READ);
}

static long tls_bio_control(BIO *bio, int command, long number, void *pointer) {
  (void)bio, (void)number, (void)pointer;
  return command == BIO_CTRL_FLUSH;
}

static BIO_METHOD *tls_bio_method(void) {
  BIO_METHOD *method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "mlfab socket");
  if (!method) return NULL;
  BIO_meth_set_write(method, tls_bio_write);
  BIO_meth_set_read(method, tls_bio_read);
  BIO_meth_set_ctrl(method, tls_bio_control);
  return method;
}

/* --- sessions --------------------------------------------------------------------------------- */

static int tls_ssl_new(tls_session *session) {
  BIO *bio = BIO_new(session->user->method);
  session->ssl = bio ? SSL_new(session->user->context) : NULL;
  if (!session->ssl) {
    BIO_free(bio);
    return MLFAB_ERR_MEMORY;
  }
  BIO_set_data(bio, session);
  BIO_set_init(bio, 1);
  SSL_set_bio(session->ssl, bio, bio);
  SSL_set_app_data(session->ssl, session);
  if (session->called) {
    SSL_set_accept_state(session->ssl);
  } else {
    SSL_set_verify(session->ssl, SSL_VERIFY_PEER, NULL); /* no certificate is trusted */
    SSL_set_connect_state(session->ssl);
  }
  return 0;
}

static void tls_end(void *opaque) {
  tls_session *session = opaque;
  mlfab_env *env = &session->user->env;
  SSL_free(session->ssl);
  env->release(env->user, session, sizeof *session);
}

static int tls_begin(void *opaque, int fd, int called, uint32_t attempt, void **session_p) {
  tls_user *user = opaque;
  tls_session *session = user->env.allocate(user->env.user, sizeof *session);
  if (!session) return MLFAB_ERR_MEMORY;
  memset(session, 0, sizeof *session);
  session->user = user;
  session->fd = fd;
  session->called = called != 0;
  session->attempt = attempt;
  session->why = "";
  if (!called && tls_ssl_new(session)) {
    tls_end(session);
    return MLFAB_ERR_MEMORY;
  }
  *session_p = session;
  return 0;
}

static const char *tls_why(void *session) { return ((tls_session *)session)->why; }

/* --- the handshake ------------------------------------------------------------------------------ */

/* Asks TCP to report the socket as readable when so many bytes are there. */
static void tls_await(const tls_session *session, int bytes) {
  (void)setsockopt(session->fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

static int tls_gone(const tls_session *session) {
#ifdef POLLRDHUP
  struct pollfd entry = {.fd = session->fd, .events = POLLRDHUP};
  return poll(&entry, 1, 0) == 1;
#else
  (void)session;
  return 0;
#endif
}

static int tls_refuse(tls_session *session, uint8_t alert, const char *why) {
  const uint8_t record[7] = {21, 3, 3, 0, 2, 2, alert};
  (void)!send(session->fd, record, sizeof record, TLS_FLAGS);
  session->why = why;
  return MLFAB_ERR_JOB;
}

static int tls_offers(const tls_user *user, const uint8_t *hello, size_t bytes) {
  for (uint32_t k = 0; k < user->count; k++)
    for (size_t i = 0; i + TLS_IDENTITY_BYTES <= bytes; i++)
      if (!memcmp(hello + i, user->keys[k].identity, TLS_IDENTITY_BYTES)) return 1;
  return 0;
}

/* Looks at a caller's bytes, and leaves them in the socket: returns 0 if they are a hello with an identity of ours.
 * This keeps out callers that do not know the identity; OpenSSL reads the hello again. */
static int tls_look(tls_session *session) {
  uint8_t hello[TLS_HELLO_MOST];
  ssize_t n = recv(session->fd, hello, sizeof hello, MSG_PEEK | MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return MLFAB_ERR_AGAIN;
  size_t wanted = 5, got = n > 0 ? (size_t)n : 0;
  if (got >= wanted) {
    if (!memcmp(hello, "MLFB", 4))
      return tls_refuse(session, TLS_ALERT_VERSION,
                        "speaks plain TCP, and this process TLS (config.transport)");
    wanted += (size_t)hello[3] << 8 | hello[4];
    if (hello[0] != 22 || hello[1] != 3 || wanted > sizeof hello)
      return tls_refuse(session, SSL_AD_DECODE_ERROR, "sent no ClientHello");
  }
  if (got < wanted) {
    session->why = "left before its handshake";
    if (n <= 0 || tls_gone(session)) return MLFAB_ERR_PEER_CLOSED;
    session->why = "";
    tls_await(session, (int)wanted);
    return MLFAB_ERR_AGAIN;
  }
  tls_await(session, 1);
  if (tls_offers(session->user, hello, wanted)) return 0;
  return tls_refuse(session, TLS_ALERT_IDENTITY,
                    "has not this job's key (MLFAB_KEY), or does not speak TLS 1.3");
}

/* Ends a failed handshake. */
static int tls_shake_failed(tls_session *session) {
  int reason = ERR_GET_REASON(ERR_peek_error());
  ERR_clear_error();
  if (reason == SSL_AD_REASON_OFFSET + TLS_ALERT_IDENTITY && !session->called) {
    session->why = "refused: the caller's key is not this job's (MLFAB_KEY)";
    /* Each key is tried twice: one failure may be an accident on the way. */
    return session->attempt + 1 < 2 * session->user->count ? MLFAB_ERR_REFUSED : MLFAB_ERR_JOB;
  }
  if (reason == SSL_AD_REASON_OFFSET + TLS_ALERT_VERSION && !session->called) {
    session->why = "it speaks plain TCP, and this process TLS (config.transport)";
    return MLFAB_ERR_JOB;
  }
  if (session->ended || reason >= SSL_AD_REASON_OFFSET) {
    session->why = session->ended ? "closed the connection in the handshake of TLS"
                                  : "refused the handshake of TLS";
    return MLFAB_ERR_PEER_CLOSED;
  }
  session->why = session->called
                     ? "has not this job's key (MLFAB_KEY), or its handshake was changed"
                     : "the handshake was changed on the way, or made without this job's key";
  return MLFAB_ERR_CRC;
}

static int tls_shake(void *opaque, int *out_p) {
  tls_session *session = opaque;
  int status = session->ssl ? 0 : tls_look(session);
  if (!status && !session->ssl) status = tls_ssl_new(session);
  if (status == MLFAB_ERR_MEMORY) session->why = "out of memory";
  if (status) return status;
  ERR_clear_error();
  int n = SSL_do_handshake(session->ssl);
  if (n == 1 && SSL_session_reused(session->ssl)) {
    session->open = 1;
    return 0;
  }
  int error = n == 1 ? SSL_ERROR_SSL : SSL_get_error(session->ssl, n);
  *out_p = error == SSL_ERROR_WANT_WRITE;
  if (error == SSL_ERROR_WANT_WRITE || error == SSL_ERROR_WANT_READ) return MLFAB_ERR_AGAIN;
  return tls_shake_failed(session);
}

/* --- bytes ------------------------------------------------------------------------------------ */

/* Handles a call of OpenSSL that moved nothing: returns -1 with errno, or 0 at the peer's end. */
static ptrdiff_t tls_stopped(tls_session *session, int status) {
  int error = SSL_get_error(session->ssl, status);
  int reason = ERR_GET_REASON(ERR_peek_error());
  ERR_clear_error();
  if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) {
    errno = EAGAIN;
    return -1;
  }
  if (error == SSL_ERROR_ZERO_RETURN || (session->ended && session->number != ECONNRESET)) return 0;
  session->failed = session->number;
  if (error == SSL_ERROR_SSL && reason >= SSL_AD_REASON_OFFSET) {
    session->failed = ECONNRESET;
    session->why = "the peer refused a record of TLS: it was changed on the way";
  } else if (error == SSL_ERROR_SSL) {
    session->failed = EBADMSG;
    session->why = "a record of TLS was changed on the way";
  }
  if (!session->failed) session->failed = EIO;
  errno = session->failed;
  return -1;
}

static int tls_is_usable(const tls_session *session) {
  if (session->open && !session->failed) return 1;
  errno = session->failed ? session->failed : ENOTCONN;
  return 0;
}

static ptrdiff_t tls_receive(void *opaque, const struct iovec *pieces, int count) {
  tls_session *session = opaque;
  size_t all = 0, n = 0;
  if (!tls_is_usable(session)) return -1;
  for (int i = 0; i < count; i++) {
    for (size_t at = 0; at < pieces[i].iov_len; at += n, all += n) {
      session->number = 0;
      ERR_clear_error();
      int status =
          SSL_read_ex(session->ssl, (uint8_t *)pieces[i].iov_base + at, pieces[i].iov_len - at, &n);
      if (status) continue;
      ptrdiff_t stopped = tls_stopped(session, status);
      return all ? (ptrdiff_t)all : stopped;
    }
  }
  return (ptrdiff_t)all;
}

/* Returns the next record: from one piece, or gathered. *i and *at: its start in the pieces. */
static const uint8_t *tls_next(const struct iovec *pieces, int count, int i, size_t at,
                               uint8_t *room, size_t *bytes_p) {
  size_t n = 0;
  if (pieces[i].iov_len - at >= TLS_RECORD_BYTES) {
    *bytes_p = TLS_RECORD_BYTES;
    return (const uint8_t *)pieces[i].iov_base + at;
  }
  for (; i < count && n < TLS_RECORD_BYTES; i++, at = 0) {
    size_t left = pieces[i].iov_len - at, part = TLS_RECORD_BYTES - n;
    if (part > left) part = left;
    memcpy(room + n, (const uint8_t *)pieces[i].iov_base + at, part);
    n += part;
  }
  *bytes_p = n;
  return room;
}

/* Starts a new key for the bytes that this end sends, with the next record. */
static void tls_renew(tls_session *session) {
  if (++session->records < TLS_RECORDS) return;
  if (SSL_key_update(session->ssl, SSL_KEY_UPDATE_NOT_REQUESTED)) session->records = 0;
}

static ptrdiff_t tls_send(void *opaque, const struct iovec *pieces, int count) {
  tls_session *session = opaque;
  uint8_t room[TLS_RECORD_BYTES];
  size_t all = 0, at = 0, bytes, n = 0;
  if (!tls_is_usable(session)) return -1;
  for (int i = 0; i < count;) {
    if (at == pieces[i].iov_len) {
      i++, at = 0;
      continue;
    }
    const uint8_t *data = tls_next(pieces, count, i, at, room, &bytes);
    session->number = 0;
    ERR_clear_error();
    int status = SSL_write_ex(session->ssl, data, bytes, &n);
    if (!status) {
      ptrdiff_t stopped = tls_stopped(session, status);
      if (stopped == 0) errno = EPIPE;
      return all ? (ptrdiff_t)all : -1;
    }
    tls_renew(session);
    for (all += n; n > 0;) {
      size_t part = pieces[i].iov_len - at < n ? pieces[i].iov_len - at : n;
      n -= part;
      at += part;
      if (n > 0) i++, at = 0;
    }
  }
  return (ptrdiff_t)all;
}

static void tls_finish(void *opaque) {
  tls_session *session = opaque;
  if (!session->open || session->failed || session->finished) return;
  session->finished = 1;
  ERR_clear_error();
  (void)SSL_shutdown(session->ssl);
  ERR_clear_error();
}

/* --- keys ------------------------------------------------------------------------------------- */

static int tls_derive(const char *text, size_t bytes, const char *what, uint8_t *out, size_t room) {
  static const char salt[] = "mlfab tls";
  EVP_PKEY_CTX *hkdf = EVP_PKEY_CTX_new_id(EVP_PKEY_HKDF, NULL);
  int done = hkdf && EVP_PKEY_derive_init(hkdf) > 0 &&
             EVP_PKEY_CTX_set_hkdf_md(hkdf, EVP_sha256()) > 0 &&
             EVP_PKEY_CTX_set1_hkdf_salt(hkdf, (const uint8_t *)salt, (int)strlen(salt)) > 0 &&
             EVP_PKEY_CTX_set1_hkdf_key(hkdf, (const uint8_t *)text, (int)bytes) > 0 &&
             EVP_PKEY_CTX_add1_hkdf_info(hkdf, (const uint8_t *)what, (int)strlen(what)) > 0 &&
             EVP_PKEY_derive(hkdf, out, &room) > 0;
  EVP_PKEY_CTX_free(hkdf);
  return done;
}

/* OpenSSL takes a PSK in the form of a session to resume. */
static SSL_SESSION *tls_psk(SSL_CTX *context, const uint8_t *psk, size_t bytes) {
  static const uint8_t suite[2] = {0x13, 0x01}; /* TLS_AES_128_GCM_SHA256 */
  SSL *ssl = SSL_new(context);
  SSL_SESSION *session = SSL_SESSION_new();
  const SSL_CIPHER *cipher = ssl ? SSL_CIPHER_find(ssl, suite) : NULL;
  int done = session && cipher && SSL_SESSION_set1_master_key(session, psk, bytes) &&
             SSL_SESSION_set_cipher(session, cipher) &&
             SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION);
  SSL_free(ssl);
  if (done) return session;
  SSL_SESSION_free(session);
  return NULL;
}

static int tls_key_make(tls_user *user, const char *text, size_t bytes) {
  uint8_t psk[32] = {0}, name[8] = {0};
  tls_key *key = &user->keys[user->count++];
  int done = tls_derive(text, bytes, "psk", psk, sizeof psk) &&
             tls_derive(text, bytes, "identity", name, sizeof name);
  key->session = done ? tls_psk(user->context, psk, sizeof psk) : NULL;
  OPENSSL_cleanse(psk, sizeof psk);
  size_t n = (size_t)snprintf(key->identity, sizeof key->identity, "mlfab-");
  for (size_t i = 0; i < sizeof name; i++, n += 2)
    snprintf(key->identity + n, sizeof key->identity - n, "%02x", name[i]);
  return key->session ? 0 : MLFAB_ERR_IO;
}

/* Errors: CONFIG (the key is missing, or the fabric refuses it), IO (OpenSSL). */
static int tls_keys_make(tls_user *user, const char *text) {
  while (text) {
    size_t n = strcspn(text, ",");
    if (n < TLS_KEY_LEAST || user->count == 2) return MLFAB_ERR_CONFIG;
    int code = tls_key_make(user, text, n);
    if (code) return code;
    text = text[n] ? text + n + 1 : NULL;
  }
  return user->count ? 0 : MLFAB_ERR_CONFIG;
}

/* Gives OpenSSL a caller's PSK. `digest`: NULL, or the only hash that a PSK may have now. */
static int tls_use(SSL *ssl, const EVP_MD *digest, const uint8_t **identity_p, size_t *bytes_p,
                   SSL_SESSION **psk_p) {
  const tls_session *session = SSL_get_app_data(ssl);
  uint32_t attempt = session->attempt;
  const tls_key *key = &session->user->keys[attempt % session->user->count];
  *psk_p = NULL;
  if (digest && EVP_MD_type(digest) != NID_sha256) return 1;
  *psk_p = SSL_SESSION_dup(key->session);
  *identity_p = (const uint8_t *)key->identity;
  *bytes_p = TLS_IDENTITY_BYTES;
  return *psk_p != NULL;
}

static int tls_find(SSL *ssl, const uint8_t *identity, size_t bytes, SSL_SESSION **psk_p) {
  const tls_session *session = SSL_get_app_data(ssl);
  const tls_user *user = session->user;
  *psk_p = NULL;
  for (uint32_t k = 0; k < user->count && bytes == TLS_IDENTITY_BYTES; k++) {
    if (memcmp(identity, user->keys[k].identity, bytes) != 0) continue;
    *psk_p = SSL_SESSION_dup(user->keys[k].session);
    return *psk_p != NULL;
  }
  return 1;
}

/* --- open and close --------------------------------------------------------------------------- */

static SSL_CTX *tls_context(void) {
  SSL_CTX *context = SSL_CTX_new(TLS_method());
  if (!context) return NULL;
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION |
                                   SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_clear_options(context, SSL_OP_ENABLE_MIDDLEBOX_COMPAT | SSL_OP_ALLOW_NO_DHE_KEX);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_read_ahead(context, 1);
  SSL_CTX_set_default_read_buffer_len(context, TLS_READ_BYTES);
  SSL_CTX_set_psk_use_session_callback(context, tls_use);
  SSL_CTX_set_psk_find_session_callback(context, tls_find);
  int done =
      SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) &&
      SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) &&
      SSL_CTX_set_num_tickets(context, 0) && SSL_CTX_set_max_early_data(context, 0) &&
      SSL_CTX_set1_groups_list(context, "X25519:P-256") &&
      SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256");
  if (done) return context;
  SSL_CTX_free(context);
  return NULL;
}

static void tls_close(void *opaque) {
  tls_user *user = opaque;
  mlfab_env env = user->env;
  for (uint32_t k = 0; k < user->count; k++) SSL_SESSION_free(user->keys[k].session);
  SSL_CTX_free(user->context);
  BIO_meth_free(user->method);
  env.release(env.user, user, sizeof *user);
}

static int tls_fail(mlfab_error *error, int code, const char *text) {
  error->code = code;
  error->rank = MLFAB_NO_RANK;
  error->is_server = 0;
  snprintf(error->text, sizeof error->text, "transport tls: %s", text);
  return code;
}

static int tls_open(const mlfab_transport_options *options, void **self_p, char *address) {
  static const mlfab_layer layer = {.size = sizeof layer,
                                    .name = "tls",
                                    .begin = tls_begin,
                                    .shake = tls_shake,
                                    .send = tls_send,
                                    .receive = tls_receive,
                                    .finish = tls_finish,
                                    .why = tls_why,
                                    .end = tls_end,
                                    .close = tls_close};
  mlfab_transport_options inner;
  if (options->size < sizeof inner)
    return tls_fail(options->error, MLFAB_ERR_CONFIG, "it was built for another version of mlfab");
  inner = *options;
  if (!options->key || !*options->key)
    return tls_fail(options->error, MLFAB_ERR_CONFIG,
                    "it needs a key (MLFAB_KEY_FILE, MLFAB_KEY; config.key)");
  tls_user *user = options->env->allocate(options->env->user, sizeof *user);
  if (!user) return tls_fail(options->error, MLFAB_ERR_MEMORY, "out of memory");
  memset(user, 0, sizeof *user);
  user->env = *options->env;
  user->context = tls_context();
  user->method = tls_bio_method();
  int code = user->context && user->method ? tls_keys_make(user, options->key) : MLFAB_ERR_IO;
  ERR_clear_error();
  if (code)
    (void)tls_fail(options->error, code,
                   code == MLFAB_ERR_CONFIG ? "the key is not one or two of 16 characters or more"
                                            : "OpenSSL has no TLS 1.3 for it");
  inner.layer = &layer;
  inner.layer_user = user;
  if (!code) code = mlfab_transport_tcp()->open(&inner, self_p, address);
  if (code) tls_close(user);
  return code;
}

static mlfab_transport tls_table;

static void tls_fill(void) {
  tls_table = *mlfab_transport_tcp();
  tls_table.name = "tls";
  tls_table.open = tls_open;
  tls_table.caps |= MLFAB_CAP_RELIABLE | MLFAB_CAP_VOUCHED;
}

const mlfab_transport *mlfab_transport_tls(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (!mlfab_transport_tcp()) return NULL;
  pthread_once(&once, tls_fill);
  return &tls_table;
}
