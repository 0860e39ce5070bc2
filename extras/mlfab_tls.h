/*
 * mlfab_tls.h - TLS 1.3 for mlfab: TCP with encrypted traffic. Optional; it needs OpenSSL 1.1.1 or later.
 *
 *    #include "mlfab_tls.h"
 *    config.transport = mlfab_transport_tls();
 *
 *    cc trainer.c mlfab.c mlfab_tls.c -lssl -lcrypto -lpthread -lm
 *    (beside them mlfab.h and mlfab_transport.h)
 *
 * Either all processes of a fabric use it, or none. They need a key (config.key, MLFAB_KEY_FILE, ...), and no
 * certificates. The key of TLS is derived from it; two keys work as config.key says. Each connection has its own keys,
 * from a Diffie-Hellman exchange: a later thief of the key cannot read recorded traffic (forward secrecy). Frames then
 * lack tags, payloads lack checksums. The fabric's proofs of its key are exchanged inside, and tell a peer's rank.
 *
 * Addresses are "tls:host:port". If config.transports is 0, this is the only transport, and takes a launcher's
 * "tcp:host:port" and "host:port". With MLFAB_USE_SHM in it, processes of one host use shared memory, and the
 * coordinator's address must begin with "tls:". The server in mlfab-run has no TLS: name a program (--tcp --server
 * PROGRAM), or let workers be servers, too (--tcp -s 0); then set transports to 0 after mlfab_config_from_env.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_TLS_H
#define MLFAB_TLS_H

#include "mlfab.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the transport, for config.transport. NULL if MLFAB_WITH_TCP is 0. mlfab_open with it: Errors: CONFIG (no
 * key), JOB (server 0 has another key, or no TLS), those of TCP. */
const mlfab_transport *mlfab_transport_tls(void);

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_TLS_H */
