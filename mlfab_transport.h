/*
 * mlfab_transport.h - the interfaces of transports and of files, and the built-in transports: TCP, shared memory, MPI.
 *
 * For those who write a transport or a layer of TCP, choose a transport by hand, or run over MPI. The rules of mlfab.h
 * apply: return values, NULL, `size`, units. mlfab.c has the code.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_TRANSPORT_H
#define MLFAB_TRANSPORT_H

#include "mlfab.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------
 * Transport interface
 *
 * A transport is a table of functions. It carries frames between the two ends of a link: whole, once, and in order
 * between UP and DOWN; at DOWN any suffix of them may be lost. Only `wait` blocks. The library calls no function of a
 * transport from two threads at once, except wait, wake and fd, which may run beside any other but close.
 *
 * A frame is a head (64-byte header with lengths inside, then meta) and a bulk. A transport of streams finds the
 * lengths with mlfab_frame_check, which also refuses what cannot be a frame before memory is allocated. A transport
 * of messages need not look inside. The first frame of a caller on a link has at most 4096 bytes, and so has every
 * frame of a link that begins with JOIN. A transport may close a link that announces more.
 */
#define MLFAB_TRANSPORT_ABI 3
#define MLFAB_HEADER_BYTES 64
#define MLFAB_META_MAX 65536   /* largest meta of a frame, bytes */
#define MLFAB_BULK_MAX 1048576 /* largest bulk of a frame, bytes */

enum mlfab_io_kind {
  MLFAB_IO_UP = 1, /* `link` is connected; `token` of connect, or 0: the peer connected */
  /* the link broke (link 0: the connect of `token` failed): `code`, `text`. Its sends no longer borrow anything */
  MLFAB_IO_DOWN = 2,
  MLFAB_IO_FRAME = 3,    /* a frame arrived: head, bulk; borrowed until release */
  MLFAB_IO_SENT = 4,     /* the bulk of the send with `token` is no longer borrowed */
  MLFAB_IO_WRITABLE = 5, /* a link that refused a send may take one now */
  MLFAB_IO_REFUSED = 6,  /* a connection was closed before it was a link (stranger, bad frame) */
  MLFAB_IO_MEASURED = 7, /* link 0: traffic of this host, in `measure` */
  MLFAB_IO_FILE = 8, /* mlfab_node.h: the file operation `token` has ended: `code`, `text`, bulk */
  /* head: the header (64 bytes) of a frame of which more has to come. token 1: it came in the midst of another frame,
   * and may be tensor bytes. A transport may report both in a fabric with a key: the node finds wrong lengths before it
   * waits */
  MLFAB_IO_HEAD = 9
};

/* Traffic of a host's network interface since the last measure; of this node only where the interface does not tell. */
typedef struct mlfab_measure {
  uint64_t elapsed_ns;
  uint64_t bytes_in, bytes_out;
  /* The rate while a sender had more to send, bytes per second; 0: too short to measure. */
  double delivery_in, delivery_out;
  double nominal; /* speed of the interface, bytes per second; 0: not told */
  /* 1: for some of the time no sender had more to send, so the bytes are a lower bound of the capacity. */
  uint32_t limited_in, limited_out;
  uint64_t own_in, own_out; /* of these bytes, those of this node */
} mlfab_measure;

/* What a transport reports. */
typedef struct mlfab_io_event {
  uint32_t kind; /* MLFAB_IO_* */
  uint32_t link; /* the transport's number for the connection, 1..2^24-1 */
  uint64_t token;
  const void *head; /* 64-byte frame header and its meta, contiguous, 8-byte aligned */
  const void *bulk; /* tensor bytes, 8-byte aligned; NULL with bulk_bytes > 0: a ghost */
  uint32_t head_bytes, bulk_bytes;
  int32_t code;  /* MLFAB_ERR_* */
  uint32_t caps; /* UP: MLFAB_CAP_* of the link's transport; set by the driver */
  /* DOWN, REFUSED: why. UP of a call: the address at which this node is reached on the way that the call took, where
   * open was given none. May be NULL; valid until release */
  const char *text;
  void *opaque;                 /* the transport's own, for release */
  const mlfab_measure *measure; /* MEASURED */
} mlfab_io_event;

enum mlfab_transport_caps {
  MLFAB_CAP_RELIABLE = 1, /* bytes arrive unchanged: payload checksums are not computed */
  MLFAB_CAP_GHOST = 2,    /* carries ghosts */
  MLFAB_CAP_LOCAL = 4,    /* reaches this host only */
  /* reports only frames that passed mlfab_frame_check and, unless it is reliable, mlfab_frame_verify */
  MLFAB_CAP_CHECKED = 8,
  MLFAB_CAP_PROBE = 16, /* has the function probe */
  /* time is virtual, and all contexts are in one thread: env.clock moves only inside wait, which runs the other
   * contexts */
  MLFAB_CAP_VIRTUAL = 32,
  /* Frames need no tags. Either the kernel of each end confirms that the other process belongs to this user or to root;
   * or the transport stops all frames that a process without the fabric's key has sent or changed. May also be set in
   * the UP event of a link. */
  MLFAB_CAP_VOUCHED = 64
};

typedef struct mlfab_transport_options {
  uint32_t size;
  uint32_t allow_insecure;
  const char *listen; /* address to listen at; "": the transport chooses */
  const char *ifname; /* as in mlfab_config */
  const char *job;
  const mlfab_env *env; /* complete: no member is NULL but store and files */
  void *user;           /* mlfab_config.transport_user */
  mlfab_error *error;   /* filled on failure; never NULL */
  uint64_t timeout_ns;  /* how long open may retry a host name to listen at; 0: it asks once */
  uint32_t keyed; /* 1: links prove a key, so addresses of the loopback need no allow_insecure */
  /* The fabric's key, one or two texts as in mlfab_config; "": none. It is wiped when the node is open. */
  const char *key;
  /* A layer for the TCP transport, or NULL; other transports ignore it. When open succeeds, the layer is the
   * transport's until close. */
  const struct mlfab_layer *layer;
  void *layer_user;
  uint32_t lend;                    /* mlfab_config.mpi_lend */
  uint32_t neighbours;              /* nodes of the fabric, if all are on this host; 0: not known */
  struct mlfab__shm_memory *memory; /* of mlfab_alloc, for the shared memory transport; or NULL */
} mlfab_transport_options;

struct mlfab_transport {
  uint32_t size;
  uint32_t abi;     /* MLFAB_TRANSPORT_ABI */
  const char *name; /* "tcp"; also what its addresses begin with, before ':' */
  uint32_t caps;    /* MLFAB_CAP_* */
  uint32_t reserved;
  /* Begins to listen. Writes the address that others connect to into `address` (256 bytes). */
  int (*open)(const mlfab_transport_options *options, void **self_p, char *address);
  /* Closes every link at once and frees everything. In a forked child of the process that called open: frees the
   * child's memory only, and touches neither the parent's links nor their peers. */
  void (*close)(void *self);
  /* 1 if this transport takes such addresses and this node can reach it, else 0. */
  int (*reach)(void *self, const char *address);
  /* Begins to connect. Never blocks, also for name servers. Reports UP or DOWN (link 0) with this token
   * later; a name that does not resolve is DOWN with ADDRESS, and may be tried again. A second connect with a token
   * that is pending replaces the first, which is never reported.
   * Errors: ADDRESS, INSECURE, MEMORY, IO; then nothing is reported. */
  int (*connect)(void *self, const char *address, uint64_t token);
  /* Sends as many of the accepted bytes as it can at once, then closes. It is the link's end: no more events, and on
   * return all bulks are free. */
  void (*disconnect)(void *self, uint32_t link);
  /* Takes a whole frame or nothing: a fabric's key is safe only if nothing of a refused frame leaves. Copies head
   * before it returns. Borrows bulk until a later poll reports SENT with the token, or DOWN; with token 0 it copies
   * bulk.
   * Errors: AGAIN (no room; WRITABLE follows when there is), PEER_CLOSED (DOWN follows). */
  int (*send)(void *self, uint32_t link, const void *head, uint32_t head_bytes, const void *bulk,
              uint32_t bulk_bytes, uint64_t token);
  /* Sends what `send` has gathered. The driver calls it before it sleeps or polls another transport. */
  void (*flush)(void *self);
  /* The next event: 1, or 0 when there is none. */
  int (*poll)(void *self, mlfab_io_event *event_p);
  /* Returns the memory of a FRAME event; in the order of the events. */
  void (*release)(void *self, const mlfab_io_event *event);
  /* Stops borrowing the bulks of all sends with this token, and copies the bytes that it still needs. SENT for it may
   * follow or not. Errors: MEMORY (still borrowed). */
  int (*detach)(void *self, uint32_t link, uint64_t token);
  /* Sleeps until poll may have something, wake is called, or timeout_ns. */
  void (*wait)(void *self, uint64_t timeout_ns);
  /* Ends a wait that is under way, or else the next one. From any thread. */
  void (*wake)(void *self);
  /* A descriptor that is readable when poll may have something, or -1. The driver calls arm(1) before it sleeps on
   * the descriptor and arm(0) after; arm(1) returns 1 when poll has something already. */
  int (*fd)(void *self);
  int (*arm)(void *self, int on);
  /* Traffic since the last call. Returns 1, or 0 when there is nothing to tell. May be NULL. */
  int (*measure)(void *self, uint64_t now_ns, mlfab_measure *measure_p);
  /* With MLFAB_CAP_PROBE; else NULL. Tells whether the peer of a silent link may still live. Called a few times a
   * heartbeat. 1: bytes of an incomplete frame have come since the last call. 0: its system acknowledges the sent
   * bytes, and its process exists. Errors: AGAIN (no acknowledgement, or the process is gone), UNSUPPORTED (this system
   * does not tell). */
  int (*probe)(void *self, uint32_t link);
  /* Both or neither may be NULL. lend: as send with a token, for memory that the program gets back from finished
   * requests only. After detach, disconnect or DOWN the transport may go on reading such a bulk; the driver tells
   * nobody of a finished request while `keeps` counts any. close waits for them.
   * keeps: their number. Writes into `whom`, if not NULL, the peer that the first of them waits for ("MPI rank 2").
   * Called often: without `whom` it costs a load. wait returns when the number has become 0. */
  int (*lend)(void *self, uint32_t link, const void *head, uint32_t head_bytes, const void *bulk,
              uint32_t bulk_bytes, uint64_t token);
  uint32_t (*keeps)(void *self, char *whom, size_t room);
  /* For the error of a call that has waited in vain: what hinders this process's connections now ("the path to ...
   * loses large packets"). 1 and a text, or 0. May be NULL. */
  int (*trouble)(void *self, char *text, size_t room);
};

struct iovec; /* <sys/uio.h> */

/* A layer between frames and sockets in the TCP transport, for encryption: extras/mlfab_tls.c is one. A transport
 * with a layer uses no Unix sockets. A session is one connection. No function blocks. */
typedef struct mlfab_layer {
  uint32_t size;
  uint32_t reserved;
  const char *name; /* its addresses begin with it, before ':', instead of "tcp" */
  /* A session of a connected socket, which the transport closes. called: the peer has connected. attempt: how often
   * `shake` has refused this call. Errors: MEMORY. */
  int (*begin)(void *user, int fd, int called, uint32_t attempt, void **session_p);
  /* Goes on with the handshake: 0 when it is done.
   * Errors: AGAIN (when the socket is readable or, with *out_p set to 1, writable), REFUSED (a caller: connect again,
   * with another attempt), JOB (a caller: no attempt will succeed), others. */
  int (*shake)(void *session, int *out_p);
  /* As sendmsg and recvmsg on a non-blocking socket. A send that was refused is repeated with the same bytes, and
   * perhaps more behind them. errno EBADMSG: the peer's bytes were changed on the way. */
  ptrdiff_t (*send)(void *session, const struct iovec *pieces, int count);
  ptrdiff_t (*receive)(void *session, const struct iovec *pieces, int count);
  /* Tells the peer, if it can, that nothing more will be sent. */
  void (*finish)(void *session);
  const char *(*why)(void *session); /* about the last error; "": nothing to add */
  void (*end)(void *session);        /* frees the session, and does not touch the socket */
  void (*close)(void *user);         /* after the last session */
} mlfab_layer;

/* Checks the first 64 bytes of a frame: magic, protocol, limits, checksum of the header. On success sets
 * *head_bytes_p (header and meta) and *bulk_bytes_p.
 * Errors: FRAME, CRC, PROTOCOL_OLDER, PROTOCOL_NEWER, LIMIT. */
MLFAB_API int mlfab_frame_check(const void *header, uint32_t *head_bytes_p, uint32_t *bulk_bytes_p);

/* Compares the frame's payload checksum with its meta and bulk: 0 or CRC. A frame without a payload checksum passes. */
MLFAB_API int mlfab_frame_verify(const void *head, uint32_t head_bytes, const void *bulk,
                                 uint32_t bulk_bytes);

/* ------------------------------------------------------------------------------------------------
 * Files
 */

/* Files, for checkpoints: the system's calls, or those of extras/mlfab_store.h for URLs. They return a number of at
 * least 0, or a negative errno. The library repeats a call after -EINTR, and goes on after a short write or read. One
 * thread calls them, one call at a time: a thread of the library; in a simulation the driving thread; for mlfab_load
 * its caller's thread. */
struct mlfab_files {
  uint32_t size;
  uint32_t reserved;
  void *user;
  /* A handle. create 1: a new empty file to write, in place of an old one; 0: an existing one to read. */
  int (*open)(void *user, const char *path, int create);
  int64_t (*write)(void *user, int file, const void *data, size_t bytes); /* how many, at the end */
  int64_t (*read)(void *user, int file, void *data, size_t bytes, uint64_t offset); /* how many */
  int (*sync)(void *user, int file);
  int (*close)(void *user, int file);
  int (*rename)(void *user, const char *from, const char *to);
  int (*sync_dir)(void *user, const char *path);
  /* The names in a directory that begin with `prefix`, each with a newline behind it: how many bytes. -ERANGE: more
   * than `room`. */
  int64_t (*list)(void *user, const char *path, const char *prefix, char *names, size_t room);
  int (*remove)(void *user, const char *path);
  /* These two may be NULL. explain: writes more about the last failed call; 0, or -1 if it knows only the errno.
   * cancel 1: the call under way, and all calls until cancel 0, soon end with -ECANCELED. mlfab_close does so in its
   * caller's thread, so remote files do not delay it. */
  int (*explain)(void *user, char *text, size_t room);
  void (*cancel)(void *user, int on);
};

/* The system's calls, which env.files NULL means: for a table that passes some paths on. NULL without
 * MLFAB_WITH_CHECKPOINT. */
MLFAB_API const mlfab_files *mlfab_files_system(void);

/* ------------------------------------------------------------------------------------------------
 * Built-in transports
 *
 * NULL where MLFAB_WITH_TCP, MLFAB_WITH_SHM or MLFAB_WITH_MPI is 0. The simulator is a transport in files of its own:
 * mlfab_sim.h.
 */
MLFAB_API const mlfab_transport *mlfab_transport_tcp(void);
MLFAB_API const mlfab_transport *mlfab_transport_shm(void);

/* MPI. Compile mlfab.c with mpicc and -DMLFAB_WITH_MPI=1, set config.transports to MLFAB_USE_MPI (MLFAB_TRANSPORT=mpi),
 * and start the program with mpirun or srun. With MLFAB_USE_MPI | MLFAB_USE_SHM (mpi+shm) processes of one host use
 * shared memory.
 *
 * World. mlfab_open is then collective over the communicator: MPI_COMM_WORLD, or the one that config.transport_user
 * points to (MPI_Comm *). mlfab uses a duplicate. Leave `coordinator` empty; rank and workers are overwritten: workers
 * are numbered in the order of their MPI ranks. With `dedicated` the processes that set the role server (MLFAB_ROLE)
 * are the servers, or, where none does, the last `servers` ones; with `scheduler` own, likewise, the scheduler. Such a
 * process, where mlfab_rank gives -1, calls mlfab_serve. join, workers_max, servers_max and replicas are refused. The
 * job, transports, servers, dedicated and scheduler must be equal in all processes.
 *
 * MPI_Init. If the program has not initialised MPI, mlfab_open does. MPI is then finalised when the process exits after
 * it has closed its contexts. If the program has initialised MPI, its thread level decides:
 *    MPI_THREAD_MULTIPLE     a progress thread is possible
 *    MPI_THREAD_SERIALIZED   progress by hand; no thread is in MPI while another is in mlfab
 *    MPI_THREAD_FUNNELED     progress by hand; only the thread that initialised MPI calls mlfab
 *    MPI_THREAD_SINGLE       (MPI_Init) is refused
 * Close contexts before MPI_Finalize.
 *
 * Buffers. Bulks are copied into blocks that MPI sends. With mpi_lend (MLFAB_MPI_LEND=1) MPI sends pushes of more than
 * 64 KiB and pieces of more than 32 KiB of plain collectives from the caller's buffers. MPI cannot take a send back. So
 * a request that has finished stays open until MPI has released all withdrawn buffers: mlfab_test says not done,
 * mlfab_wait returns TIMEOUT and names the MPI rank that has not taken the data, and calls that wait may return after
 * their deadline. After mlfab_cancel the buffers are the caller's only when test or wait has ended the request.
 * mlfab_close and mlfab_abandon wait, at most for timeout_ns, until MPI has released everything. If it has not (the log
 * says so), the buffers must stay as they are until MPI_Finalize. MPI releases them when the other process calls mlfab
 * or MPI again.
 *
 * Price. At most 2.5 MiB are under way for each link and direction, and as much memory is in blocks. MPI cannot wake a
 * sleeper: a waiter that has spun polls with naps of up to 1 ms; mlfab_fd returns UNSUPPORTED. When a process dies, MPI
 * ends the job: take checkpoints (mlfab.h, section 7).
 * Errors of mlfab_open: CONFIG (thread level, roles), WORLD and JOB (settings differ), TIMEOUT (processes have not
 * opened), IO. STATE: MPI was finalised, this is the wrong thread, or an open over this communicator has failed before.
 * The texts name MPI ranks; `rank` is MLFAB_NO_RANK. Before an opening that takes too long fails, processes ask each
 * other over the program's communicator, by empty messages with the largest tag (MPI_TAG_UB). */
MLFAB_API const mlfab_transport *mlfab_transport_mpi(void);

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_TRANSPORT_H */
