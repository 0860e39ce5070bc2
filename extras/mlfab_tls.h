/*
 * mlfab_tls.h - TLS 1.3 for mlfab: TCP whose traffic is encrypted. Optional; it needs OpenSSL 1.1.1 or later.
 *
 *    #include "mlfab_tls.h"
 *    config.transport = mlfab_transport_tls();
 *
 *    cc trainer.c mlfab.c mlfab_tls.c -lssl -lcrypto -lpthread -lm
 *
 * All processes of a fabric use it, or none. They need a key (config.key, MLFAB_KEY_FILE, ...) and nothing else: there are no
 * certificates. The key of TLS is derived from it; two keys work as config.key says. Each connection has keys of its own from a
 * Diffie-Hellman exchange, so whoever gets the fabric's key later cannot read what was recorded (forward secrecy). Frames have
 * no tags then, nor checksums of payloads. The proofs of the fabric's key are exchanged inside, and tell which rank a peer is.
 *
 * Addresses are "tls:host:port". Where config.transports is 0, this is the only transport, and takes a launcher's "tcp:host:port"
 * and "host:port" for its own. With MLFAB_USE_SHM there, processes of one host use shared memory, and the coordinator's
 * address must begin with "tls:". The built-in server of mlfab-run has no TLS: name a program (--tcp --server PROGRAM), or
 * let workers be servers too (--tcp -s 0). Set config.transports to 0 after mlfab_config_from_env there.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_TLS_H
#define MLFAB_TLS_H

#include "mlfab.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The transport, for config.transport. NULL where MLFAB_WITH_TCP is 0. mlfab_open with it:
 * Errors: CONFIG (no key), JOB (server 0 has another key, or no TLS), those of TCP. */
const mlfab_transport *mlfab_transport_tls(void);

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_TLS_H */
