/* Plays libhccl.so and the part of libascendcl.so below it, on a CPU, for tests.
 *
 * Like the real ones: names, argument types, enum values and the 4108 bytes of root info; a stream is a queue that a
 * thread of its own works off, so that calls only enqueue; a peer that dies is not noticed, the operation waits for the
 * execution time-out and then leaves its stream broken for good; a communicator with work is not destroyed (20); one NPU
 * in two ranks, root info of another process and disagreeing ranks are refused; a taken port is 11.
 *
 * Not like them, so that no test here says anything about it: device memory is host memory; links are loopback sockets
 * and are all made at once, not at the first operation; there are no slave streams, no buffers per communicator
 * (HCCL_BUFFSIZE), no AIV kernels, no RDMA and none of its errors (21); ranks of one communicator whose calls do not
 * match get error 1 on their streams, where HCCL hangs or mixes the bytes up; a reduction of floats adds in rank order;
 * speed means nothing. Which result codes the real library gives for these situations is from its documentation only.
 *
 * Knobs, from the environment at load or from fake_knob() later, all optional:
 *   FAKE_HCCL_DELAY_MS                          every collective first sleeps so long on its stream
 *   FAKE_HCCL_CONNECT_MS, FAKE_HCCL_EXEC_MS     instead of HCCL_CONNECT_TIMEOUT and HCCL_EXEC_TIMEOUT (seconds)
 *   FAKE_HCCL_FAIL                              "HcclBroadcast:5,HcclCommDestroy:20": these calls return that code
 *   FAKE_HCCL_DRY                               operations end at once and touch no memory
 *   FAKE_NPU_COUNT                              NPUs of the machine (8)
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MAX_RANKS 16
#define ROOT_BYTES 4108

enum { OK = 0, E_PARA = 1, E_PTR = 2, E_NOT_SUPPORT = 5, E_NOT_FOUND = 6, E_TIMEOUT = 9, E_TCP_CONNECT = 11, E_AGAIN = 20 };
enum { ACL_BROKEN = 507000 };
enum { I8, I16, I32, F16, F32, I64, U64, U8, U16, U32, F64, BF16, I128, HIF8 = 14, F8E4M3, F8E5M2, F8E8M0 };
enum { SUM, PROD, MAX, MIN };

/* ------------------------------------------------------------------------------------------------ knobs and records */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* of all that is global here */
static struct { const char *name; char value[256]; int set; } knobs[] = {
    {"FAKE_HCCL_DELAY_MS"}, {"FAKE_HCCL_CONNECT_MS"}, {"FAKE_HCCL_EXEC_MS"}, {"FAKE_HCCL_FAIL"}, {"FAKE_HCCL_DRY"}};
#define N_KNOBS (sizeof knobs / sizeof *knobs)

API int fake_knob(const char *name, const char *value) {
  for (size_t i = 0; i < N_KNOBS; i++)
    if (!strcmp(knobs[i].name, name)) {
      pthread_mutex_lock(&mutex);
      snprintf(knobs[i].value, sizeof knobs[i].value, "%s", value);
      knobs[i].set = value[0] != 0;
      pthread_mutex_unlock(&mutex);
      return 0;
    }
  return -1;
}
static __attribute__((constructor)) void read_knobs(void) {
  for (size_t i = 0; i < N_KNOBS; i++) fake_knob(knobs[i].name, getenv(knobs[i].name) ? getenv(knobs[i].name) : "");
}
static int knob(const char *name, char out[256]) {
  int set = 0;
  pthread_mutex_lock(&mutex);
  for (size_t i = 0; i < N_KNOBS; i++)
    if (!strcmp(knobs[i].name, name) && (set = knobs[i].set)) memcpy(out, knobs[i].value, 256);
  pthread_mutex_unlock(&mutex);
  return set;
}
static int64_t knob_ms(const char *name, const char *seconds, int64_t otherwise_s) {
  char text[256];
  if (knob(name, text)) return atoll(text);
  const char *real = seconds ? getenv(seconds) : NULL;
  return (real && *real ? atoll(real) : otherwise_s) * 1000;
}
static int64_t now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static struct { char name[32]; uint64_t calls, count; } records[32];

static void record(const char *name, uint64_t count) {
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < 32; i++)
    if (!records[i].name[0] || !strcmp(records[i].name, name)) {
      snprintf(records[i].name, sizeof records[i].name, "%s", name);
      records[i].calls++, records[i].count = count;
      break;
    }
  pthread_mutex_unlock(&mutex);
}
/* How often a function was called, and the count of its last call: as many bits as have come through the ABI. */
API uint64_t fake_calls(const char *name) {
  for (int i = 0; i < 32; i++) if (!strcmp(records[i].name, name)) return records[i].calls;
  return 0;
}
API uint64_t fake_last_count(const char *name) {
  for (int i = 0; i < 32; i++) if (!strcmp(records[i].name, name)) return records[i].count;
  return 0;
}
static int injected(const char *name) {
  char text[256];
  size_t n = strlen(name);
  if (!knob("FAKE_HCCL_FAIL", text)) return 0;
  for (char *at = text; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
    if (!strncmp(at, name, n) && at[n] == ':') return atoi(at + n + 1);
  return 0;
}
#define ENTER(name, count) do { record(name, count); int code_ = injected(name); if (code_) return code_; } while (0)

/* ----------------------------------------------------------------------------------------------- streams and events */

typedef int Work(void *);
typedef struct Task { Work *work; void *with; struct Task *next; } Task;
typedef struct { pthread_mutex_t lock; pthread_cond_t moved; Task *first, *last; int busy, broken, device; } Stream;
typedef struct { pthread_mutex_t lock; pthread_cond_t moved; uint64_t asked, reached; } Event;
typedef struct { Event *event; uint64_t turn; } Turn;
static __thread int device;

static void *work_off(void *arg) {
  Stream *s = arg;
  pthread_mutex_lock(&s->lock);
  for (;;) {
    while (!s->first) pthread_cond_wait(&s->moved, &s->lock);
    Task *task = s->first;
    if (!(s->first = task->next)) s->last = NULL;
    s->busy = 1;
    pthread_mutex_unlock(&s->lock);
    int code = task->work(task->with);
    free(task->with), free(task);
    pthread_mutex_lock(&s->lock);
    if (code && !s->broken) s->broken = code;
    s->busy = 0;
    pthread_cond_broadcast(&s->moved);
  }
  return NULL;
}
static void enqueue(Stream *s, Work *work, const void *with, size_t size) {
  Task *task = calloc(1, sizeof *task);
  task->work = work, task->with = memcpy(malloc(size), with, size);
  pthread_mutex_lock(&s->lock);
  if (s->last) s->last->next = task; else s->first = task;
  s->last = task;
  pthread_cond_broadcast(&s->moved);
  pthread_mutex_unlock(&s->lock);
}
API int aclrtSetDevice(int32_t to) { device = to; return OK; }
API int aclrtGetDeviceCount(uint32_t *count) { /* ids that do not exist are dropped without a word */
  const char *all = getenv("FAKE_NPU_COUNT"), *mask = getenv("ASCEND_RT_VISIBLE_DEVICES");
  uint32_t total = all && *all ? (uint32_t)atoi(all) : 8;
  *count = mask ? 0 : total;
  for (const char *at = mask; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
    if ((uint32_t)atoi(at) < total) ++*count;
  return OK;
}
API int aclrtCreateStream(void **out) {
  Stream *s = calloc(1, sizeof *s);
  pthread_t thread;
  pthread_mutex_init(&s->lock, NULL), pthread_cond_init(&s->moved, NULL);
  s->device = device;
  if (pthread_create(&thread, NULL, work_off, s)) return ACL_BROKEN;
  pthread_detach(thread);
  *out = s;
  return OK;
}
API int aclrtStreamQuery(void *stream, int32_t *complete) {
  Stream *s = stream;
  pthread_mutex_lock(&s->lock);
  *complete = !s->first && !s->busy;
  int broken = s->broken;
  pthread_mutex_unlock(&s->lock);
  return broken;
}
API int aclrtSynchronizeStream(void *stream) {
  Stream *s = stream;
  pthread_mutex_lock(&s->lock);
  while (s->first || s->busy) pthread_cond_wait(&s->moved, &s->lock);
  int broken = s->broken;
  pthread_mutex_unlock(&s->lock);
  return broken;
}
API int aclrtCreateEvent(void **out) {
  Event *e = calloc(1, sizeof *e); /* never freed: a queued task may hold it */
  pthread_mutex_init(&e->lock, NULL), pthread_cond_init(&e->moved, NULL);
  *out = e;
  return OK;
}
static int reach(void *with) {
  Turn *t = with;
  pthread_mutex_lock(&t->event->lock);
  if (t->turn > t->event->reached) t->event->reached = t->turn;
  pthread_cond_broadcast(&t->event->moved);
  pthread_mutex_unlock(&t->event->lock);
  return OK;
}
static int await(void *with) {
  Turn *t = with;
  pthread_mutex_lock(&t->event->lock);
  while (t->event->reached < t->turn) pthread_cond_wait(&t->event->moved, &t->event->lock);
  pthread_mutex_unlock(&t->event->lock);
  return OK;
}
API int aclrtRecordEvent(void *event, void *stream) {
  Event *e = event;
  pthread_mutex_lock(&e->lock);
  Turn t = {e, ++e->asked};
  pthread_mutex_unlock(&e->lock);
  enqueue(stream, reach, &t, sizeof t);
  return OK;
}
API int aclrtStreamWaitEvent(void *stream, void *event) {
  Event *e = event;
  pthread_mutex_lock(&e->lock);
  Turn t = {e, e->asked};
  pthread_mutex_unlock(&e->lock);
  enqueue(stream, await, &t, sizeof t);
  return OK;
}
API int aclrtQueryEventStatus(void *event, int32_t *complete) {
  Event *e = event;
  pthread_mutex_lock(&e->lock);
  *complete = e->reached >= e->asked;
  pthread_mutex_unlock(&e->lock);
  return OK;
}
API int aclrtSynchronizeEvent(void *event) {
  Turn t = {event, ((Event *)event)->asked};
  return await(&t);
}
typedef struct { void *to; const void *from; size_t size; } Copy;
static int copy(void *with) { Copy *c = with; memcpy(c->to, c->from, c->size); return OK; }
API int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
  (void)kind;
  if (size > room) return ACL_BROKEN;
  Copy c = {to, from, size};
  enqueue(stream, copy, &c, sizeof c);
  return OK;
}
static int nap(void *with) { usleep((useconds_t)(*(int *)with * 1000)); return OK; }
/* A kernel that takes this long. */
API int fake_sleep(int ms, void *stream) { enqueue(stream, nap, &ms, sizeof ms); return OK; }

/* ---------------------------------------------------------------------------------------------------------- sockets */

static int carry(int fd, void *memory, size_t size, int out, int64_t until) {
  for (char *at = memory; size;) {
    if (now_ms() >= until) return E_TIMEOUT;
    struct pollfd f = {fd, out ? POLLOUT : POLLIN, 0};
    if (poll(&f, 1, 20) <= 0) continue;
    ssize_t n = out ? send(fd, at, size, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, at, size, MSG_DONTWAIT);
    if (n > 0) { at += n, size -= (size_t)n; continue; }
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    while (now_ms() < until) usleep(5000); /* the peer is gone, which an NPU does not notice */
    return E_TIMEOUT;
  }
  return OK;
}
static int listen_at(int port, uint16_t *got) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  socklen_t size = sizeof a;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(fd, (void *)&a, sizeof a) || listen(fd, MAX_RANKS) || getsockname(fd, (void *)&a, &size)) return close(fd), -1;
  *got = ntohs(a.sin_port);
  return fd;
}
/* HCCL_HOST_SOCKET_PORT_RANGE: "auto" or "a-b,c"; without it 16 ports from HCCL_IF_BASE_PORT. */
static int root_listener(uint16_t *got) {
  const char *range = getenv("HCCL_HOST_SOCKET_PORT_RANGE"), *base = getenv("HCCL_IF_BASE_PORT");
  char usual[32];
  if (range && !strcmp(range, "auto")) return listen_at(0, got);
  snprintf(usual, sizeof usual, "%d-%d", base ? atoi(base) : 60000, (base ? atoi(base) : 60000) + 15);
  for (const char *at = range && *range ? range : usual; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
    int from = 0, to = 0, fd;
    if (sscanf(at, "%d-%d", &from, &to) < 2) to = from;
    for (int port = from; port <= to; port++) if ((fd = listen_at(port, got)) >= 0) return fd;
  }
  return -1;
}
static void quick(int fd) { int one = 1; setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); }
static int dial(uint16_t port, int64_t until) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (; now_ms() < until; usleep(10000)) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!connect(fd, (void *)&a, sizeof a)) return quick(fd), fd;
    close(fd);
  }
  return -1;
}
static int answer(int listener, int64_t until) {
  struct pollfd f = {listener, POLLIN, 0};
  int64_t left = until - now_ms();
  if (left <= 0 || poll(&f, 1, (int)left) <= 0) return -1;
  int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
  if (fd >= 0) quick(fd);
  return fd;
}

/* ---------------------------------------------------------------------------------------------------- communicators */

typedef struct Comm { uint32_t size, rank; int to[MAX_RANKS], device, pending; pthread_mutex_t lock; struct Comm *next; } Comm;
typedef struct { uint64_t key; uint16_t port; } Root;
typedef struct { uint64_t key; uint32_t rank, size; int32_t npu; uint16_t port; } Card;
static Comm *comms;
static struct { uint64_t key; int listener; } roots[64];

static int npu_of(int index) {
  const char *at = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!at) return index;
  for (; at && index; index--) at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL;
  return at ? atoi(at) : -1;
}
API const char *HcclGetErrorString(int code) {
  static const char *texts[] = {"no error", "parameter error", "empty pointer", "out of memory", "internal error",
      "not support feature", "not found specific resource", "resource unavailable", "call system interface error",
      "timeout", "open file fail", "tcp connect fail", "roce connect fail", "tcp transfer fail", "roce transfer fail",
      "call runtime api fail", "call driver api fail", "call profiling api fail", "call cce api fail",
      "call network api fail", "try again", "error cqe"};
  return code >= 0 && code < (int)(sizeof texts / sizeof *texts) ? texts[code] : "unknown error";
}
API int HcclGetRootInfo(char *out) {
  ENTER("HcclGetRootInfo", 0);
  if (!out) return E_PTR;
  Root root = {0};
  int fd = root_listener(&root.port);
  if (fd < 0) return E_TCP_CONNECT;
  root.key = ((uint64_t)getpid() << 32) ^ ((uint64_t)now_ms() << 16) ^ root.port;
  memset(out, 0, ROOT_BYTES);
  memcpy(out, &root, sizeof root);
  memset(out + ROOT_BYTES - 100, 0xA5, 100); /* zeros inside and bytes to the very end: what is cut off is noticed */
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < 64; i++) if (!roots[i].key) { roots[i].key = root.key, roots[i].listener = fd; break; }
  pthread_mutex_unlock(&mutex);
  return OK;
}
static int take_root(uint64_t key) {
  int fd = -1;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < 64; i++) if (roots[i].key == key) fd = roots[i].listener, roots[i].key = 0;
  pthread_mutex_unlock(&mutex);
  return fd;
}
/* Rank 0 collects a card of each rank, judges them and hands the judgement and all cards back. */
static int be_root(Comm *c, int listener, Card *cards, int64_t until) {
  int code = OK;
  for (uint32_t come = 1; come < c->size && !code;) {
    Card card;
    int fd = answer(listener, until);
    if (fd < 0 || carry(fd, &card, sizeof card, 0, until)) { if (fd >= 0) close(fd); code = E_TIMEOUT; break; }
    if (card.key != cards[0].key) { close(fd); continue; }
    if (card.size != c->size || card.rank >= c->size || c->to[card.rank] >= 0) { close(fd); code = E_PARA; break; }
    for (uint32_t i = 0; i < c->size; i++) if ((!i || c->to[i] >= 0) && cards[i].npu == card.npu) code = E_PARA;
    cards[card.rank] = card, c->to[card.rank] = fd, come++;
  }
  for (uint32_t i = 1; i < c->size; i++)
    if (c->to[i] >= 0 && (carry(c->to[i], &code, sizeof code, 1, now_ms() + 1000) ||
                          (!code && carry(c->to[i], cards, sizeof *cards * c->size, 1, until)))) code = E_TIMEOUT;
  return code;
}
static int be_guest(Comm *c, int listener, const Root *root, Card *cards, int64_t until) {
  Card mine = cards[c->rank];
  int code = OK;
  if ((c->to[0] = dial(root->port, until)) < 0 || carry(c->to[0], &mine, sizeof mine, 1, until) ||
      carry(c->to[0], &code, sizeof code, 0, until)) return E_TIMEOUT;
  if (code || carry(c->to[0], cards, sizeof *cards * c->size, 0, until)) return code ? code : E_TIMEOUT;
  for (uint32_t i = 1; i < c->rank; i++)
    if ((c->to[i] = dial(cards[i].port, until)) < 0 || carry(c->to[i], &c->rank, 4, 1, until)) return E_TIMEOUT;
  for (uint32_t left = c->size - 1 - c->rank, who; left; left--) {
    int fd = answer(listener, until);
    if (fd < 0 || carry(fd, &who, 4, 0, until) || who >= c->size) return E_TIMEOUT;
    c->to[who] = fd;
  }
  return OK;
}
static void hang_up(Comm *c) {
  for (uint32_t i = 0; i < c->size; i++) if (c->to[i] >= 0) close(c->to[i]);
  free(c);
}
API int HcclCommInitRootInfo(uint32_t size, const char *info, uint32_t rank, void **out) {
  ENTER("HcclCommInitRootInfo", size);
  if (!info || !out) return E_PTR;
  Root root;
  memcpy(&root, info, sizeof root);
  if (!root.key || (unsigned char)info[ROOT_BYTES - 1] != 0xA5 || !size || size > MAX_RANKS || rank >= size) return E_PARA;
  Card cards[MAX_RANKS] = {{0}};
  Comm *c = calloc(1, sizeof *c);
  c->size = size, c->rank = rank, c->device = device;
  pthread_mutex_init(&c->lock, NULL);
  for (int i = 0; i < MAX_RANKS; i++) c->to[i] = -1;
  int64_t until = now_ms() + knob_ms("FAKE_HCCL_CONNECT_MS", "HCCL_CONNECT_TIMEOUT", 120);
  uint16_t port = root.port;
  int listener = rank ? listen_at(0, &port) : take_root(root.key);
  if (listener < 0) { hang_up(c); return E_PARA; } /* root info of another process, or used before */
  cards[rank] = (Card){root.key, rank, size, npu_of(device), port};
  int code = rank ? be_guest(c, listener, &root, cards, until) : be_root(c, listener, cards, until);
  close(listener);
  if (code) { hang_up(c); return code; }
  pthread_mutex_lock(&mutex);
  c->next = comms, comms = c;
  pthread_mutex_unlock(&mutex);
  *out = c;
  return OK;
}
static Comm *living(void *comm) {
  pthread_mutex_lock(&mutex);
  Comm *c = comms;
  while (c && c != comm) c = c->next;
  pthread_mutex_unlock(&mutex);
  return c;
}
API int HcclCommDestroy(void *comm) {
  ENTER("HcclCommDestroy", 0);
  pthread_mutex_lock(&mutex);
  Comm **at = &comms;
  while (*at && *at != comm) at = &(*at)->next;
  Comm *c = *at;
  int code = !c ? E_PARA : __atomic_load_n(&c->pending, __ATOMIC_SEQ_CST) ? E_AGAIN : OK;
  if (!code) *at = c->next;
  pthread_mutex_unlock(&mutex);
  if (!code) hang_up(c);
  return code;
}
API int HcclGetCommAsyncError(void *comm, int *code) { if (!living(comm) || !code) return E_PTR; *code = OK; return OK; }
API int HcclGetRankId(void *comm, uint32_t *rank) { Comm *c = living(comm); if (!c) return E_PARA; *rank = c->rank; return OK; }
API int HcclGetRankSize(void *comm, uint32_t *n) { Comm *c = living(comm); if (!c) return E_PARA; *n = c->size; return OK; }
API int fake_live_comms(void) {
  int n = 0;
  pthread_mutex_lock(&mutex);
  for (Comm *c = comms; c; c = c->next) n++;
  pthread_mutex_unlock(&mutex);
  return n;
}

/* ------------------------------------------------------------------------------------------------------- operations */

enum { BROADCAST = 1, ALL_REDUCE, REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND, RECEIVE };
typedef struct { int what, type, with, root; uint64_t count; } Call; /* what all ranks must agree on */
typedef struct { Comm *c; Call call; char *in, *out; } Operation;

static size_t width(int type) {
  static const uint8_t widths[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16, 0, 1, 1, 1, 1};
  return type >= 0 && type < (int)sizeof widths ? widths[type] : 0;
}
static float wide(uint16_t b) { uint32_t u = (uint32_t)b << 16; float f; memcpy(&f, &u, 4); return f; }
static uint16_t narrow(float f) { uint32_t u; memcpy(&u, &f, 4); return (uint16_t)((u + 0x7FFF + ((u >> 16) & 1)) >> 16); }
#define COMBINE(x, y, with) ((with) == SUM ? (x) + (y) : (with) == PROD ? (x) * (y) : \
                             (with) == MAX ? ((x) > (y) ? (x) : (y)) : ((x) < (y) ? (x) : (y)))
#define EACH(T) { T *a = into; const T *b = from; for (uint64_t i = 0; i < n; i++) a[i] = (T)COMBINE(a[i], b[i], with); } break
static void combine(void *into, const void *from, uint64_t n, int type, int with) {
  switch (type) {
    case I8: EACH(int8_t);
    case I16: EACH(int16_t);
    case I32: EACH(int32_t);
    case I64: EACH(int64_t);
    case F16: EACH(_Float16);
    case F32: EACH(float);
    case BF16: { uint16_t *a = into; const uint16_t *b = from;
      for (uint64_t i = 0; i < n; i++) a[i] = narrow(COMBINE(wide(a[i]), wide(b[i]), with)); } break;
  }
}
static int give(Operation *o, uint32_t peer, const void *from, uint64_t count, int64_t until) {
  int code = carry(o->c->to[peer], &o->call, sizeof o->call, 1, until);
  return code ? code : carry(o->c->to[peer], (void *)from, count * width(o->call.type), 1, until);
}
static int get(Operation *o, uint32_t peer, void *into, uint64_t count, int64_t until) {
  Call call;
  int code = carry(o->c->to[peer], &call, sizeof call, 0, until);
  if (!code && memcmp(&call, &o->call, sizeof call)) code = E_PARA;
  return code ? code : carry(o->c->to[peer], into, count * width(o->call.type), 0, until);
}
static int reduce_at(Operation *o, uint32_t root, uint64_t full, int64_t until) {
  Comm *c = o->c;
  Call call = o->call;
  size_t bytes = full * width(call.type);
  int code = OK;
  if (c->rank != root) {
    code = give(o, root, o->in, full, until);
    return code || call.what == REDUCE ? code : get(o, root, o->out, call.count, until);
  }
  char *sum = memcpy(malloc(bytes + 1), o->in, bytes), *part = malloc(bytes + 1);
  for (uint32_t i = 0; i < c->size && !code; i++)
    if (i != root && !(code = get(o, i, part, full, until))) combine(sum, part, full, call.type, call.with);
  size_t step = call.what == REDUCE_SCATTER ? call.count * width(call.type) : 0;
  for (uint32_t i = 0; i < c->size && !code && call.what != REDUCE; i++)
    if (i != root) code = give(o, i, sum + i * step, call.count, until);
  if (!code) memcpy(o->out, sum + root * step, call.count * width(call.type));
  free(sum), free(part);
  return code;
}
static int perform(Operation *o, int64_t until) {
  Comm *c = o->c;
  uint32_t root = (uint32_t)o->call.root;
  uint64_t n = o->call.count;
  size_t bytes = n * width(o->call.type);
  int code = OK;
  switch (o->call.what) {
    case BROADCAST:
      if (c->rank != root) return get(o, root, o->out, n, until);
      for (uint32_t i = 0; i < c->size && !code; i++) if (i != root) code = give(o, i, o->in, n, until);
      return code;
    case ALL_REDUCE: return reduce_at(o, 0, n, until);
    case REDUCE: return reduce_at(o, root, n, until);
    case REDUCE_SCATTER: return reduce_at(o, 0, n * c->size, until);
    case ALL_GATHER:
      memmove(o->out + c->rank * bytes, o->in, bytes);
      for (uint32_t from = 0; from < c->size && !code; from++)
        for (uint32_t to = 0; to < c->size && !code; to++)
          if (from != to && c->rank == from) code = give(o, to, o->in, n, until);
          else if (from != to && c->rank == to) code = get(o, from, o->out + from * bytes, n, until);
      return code;
    case SEND: { Operation told = *o; told.call.root = 0; return give(&told, root, o->in, n, until); }
    case RECEIVE: { Operation told = *o; told.call.what = SEND, told.call.root = 0; return get(&told, root, o->out, n, until); }
  }
  return E_PARA;
}
static int run(void *with) {
  Operation *o = with;
  char text[256];
  int code = OK;
  if (knob("FAKE_HCCL_DELAY_MS", text)) usleep((useconds_t)atoi(text) * 1000);
  if (!knob("FAKE_HCCL_DRY", text)) {
    pthread_mutex_lock(&o->c->lock);
    code = perform(o, now_ms() + knob_ms("FAKE_HCCL_EXEC_MS", "HCCL_EXEC_TIMEOUT", 1836));
    pthread_mutex_unlock(&o->c->lock);
  }
  __atomic_sub_fetch(&o->c->pending, 1, __ATOMIC_SEQ_CST);
  return code ? ACL_BROKEN + code : OK;
}
static int launch(int what, const void *in, void *out, uint64_t n, int type, int with, uint32_t root, void *comm, void *stream) {
  Comm *c = living(comm);
  int reduces = what == ALL_REDUCE || what == REDUCE || what == REDUCE_SCATTER;
  if (!c || !width(type) || root >= c->size || with < SUM || with > MIN) return E_PARA;
  if (!stream || (n && (!in || !out))) return E_PTR;
  if (((Stream *)stream)->device != c->device) return E_PARA;
  if (reduces && type != I8 && type != I16 && type != I32 && type != I64 && type != F16 && type != F32 && type != BF16)
    return E_NOT_SUPPORT;
  Operation o = {c, {what, type, with, (int)root, n}, (char *)in, out};
  __atomic_add_fetch(&c->pending, 1, __ATOMIC_SEQ_CST);
  enqueue(stream, run, &o, sizeof o);
  return OK;
}
API int HcclBroadcast(void *at, uint64_t n, int type, uint32_t root, void *c, void *s) {
  ENTER("HcclBroadcast", n);
  return launch(BROADCAST, at, at, n, type, SUM, root, c, s);
}
API int HcclAllReduce(void *in, void *out, uint64_t n, int type, int op, void *c, void *s) {
  ENTER("HcclAllReduce", n);
  return launch(ALL_REDUCE, in, out, n, type, op, 0, c, s);
}
API int HcclReduce(void *in, void *out, uint64_t n, int type, int op, uint32_t root, void *c, void *s) {
  ENTER("HcclReduce", n);
  return launch(REDUCE, in, out, n, type, op, root, c, s);
}
API int HcclAllGather(void *in, void *out, uint64_t n, int type, void *c, void *s) {
  ENTER("HcclAllGather", n);
  return launch(ALL_GATHER, in, out, n, type, SUM, 0, c, s);
}
API int HcclReduceScatter(void *in, void *out, uint64_t n, int type, int op, void *c, void *s) {
  ENTER("HcclReduceScatter", n);
  return launch(REDUCE_SCATTER, in, out, n, type, op, 0, c, s);
}
API int HcclSend(void *at, uint64_t n, int type, uint32_t peer, void *c, void *s) {
  ENTER("HcclSend", n);
  return launch(SEND, at, at, n, type, SUM, peer, c, s);
}
API int HcclRecv(void *at, uint64_t n, int type, uint32_t peer, void *c, void *s) {
  ENTER("HcclRecv", n);
  return launch(RECEIVE, at, at, n, type, SUM, peer, c, s);
}
