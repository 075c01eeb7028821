/* Products of a sparse matrix W [out, in] with rows of activations, for training on a CPU.
 *
 * A panel is PANEL rows of X, turned so that the PANEL numbers of one feature lie side by side: four registers. One live
 * weight is read once, broadcast, and multiplied with four registers; nothing is gathered. Panels are made and unmade by
 * transposes in registers, in scratch memory that stays in the second-level cache.
 *
 *     forward    Y = X W^T + b        pieces of rows of W over blocks of features that stay in the first-level cache
 *     backward   dX = dY W and dV = (dY^T X) at the live places, column by column: each dY is loaded once for both
 *
 * The file is compiled for one instruction set at a time, LANES floats a register, in the vector extensions of GCC and
 * Clang. Sums run in float32 and in an order that follows from shapes and mask alone: not from the number of threads.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#ifndef LANES
#define LANES 4
#endif
#define PANEL (4 * LANES)
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t half __attribute__((vector_size(2 * LANES)));
/* Memory is read and written by these: a row may begin anywhere. */
typedef float vec_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t half_at __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* Sums over the lanes of a register of sixteen are taken by halves. */
#define HALF (LANES == 16 ? 8 : LANES)
typedef float hvec __attribute__((vector_size(4 * HALF)));
typedef int32_t hints __attribute__((vector_size(4 * HALF)));
typedef float hvec_at __attribute__((vector_size(4 * HALF), aligned(4), may_alias));

/* LOk takes blocks of k lanes that begin at even multiples of k, first of a, then of b; HIk the others. HLOk and HHIk do
 * so with halves. */
#if LANES >= 8
#define HLO1 0, 8, 2, 10, 4, 12, 6, 14
#define HHI1 1, 9, 3, 11, 5, 13, 7, 15
#define HLO2 0, 1, 8, 9, 4, 5, 12, 13
#define HHI2 2, 3, 10, 11, 6, 7, 14, 15
#define HLO4 0, 1, 2, 3, 8, 9, 10, 11
#define HHI4 4, 5, 6, 7, 12, 13, 14, 15
#else
#define HLO1 0, 4, 2, 6
#define HHI1 1, 5, 3, 7
#define HLO2 0, 1, 4, 5
#define HHI2 2, 3, 6, 7
#endif
#if LANES == 16
#define LO1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HI1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define LO2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HI2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LO4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HI4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LO8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HI8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#else
#define LO1 HLO1
#define HI1 HHI1
#define LO2 HLO2
#define HI2 HHI2
#define LO4 HLO4
#define HI4 HHI4
#endif
#ifdef __clang__
#define TAKE(kind, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TAKE(kind, a, b, ...) __builtin_shuffle(a, b, (kind){__VA_ARGS__})
#endif

INLINE vec load(const void *at, const int bf16) {
  if (!bf16) return *(const vec_at *)at;
  return (vec)(__builtin_convertvector((half) * (const half_at *)at, bits) << 16);
}

INLINE void store(void *at, vec value, const int bf16) {
  if (!bf16) {
    *(vec_at *)at = value;
    return;
  }
  bits u = (bits)value, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16; /* to nearest, ties to even */
  bits nan = (bits)((u & 0x7fffffff) > 0x7f800000);
  *(half_at *)at = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), half);
}

INLINE float load1(const void *at, int64_t i, const int bf16) {
  if (!bf16) return ((const float *)at)[i];
  uint32_t u = (uint32_t)((const uint16_t *)at)[i] << 16;
  float value;
  memcpy(&value, &u, 4);
  return value;
}

INLINE void store1(void *at, int64_t i, float value, const int bf16) {
  vec wide = {value};
  half_at narrow[1];
  if (!bf16) {
    ((float *)at)[i] = value;
    return;
  }
  store(narrow, wide, 1);
  memcpy((uint16_t *)at + i, narrow, 2);
}

INLINE void transpose(vec *a) {
#define SWAP(k, LO, HI)                     \
  _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) if (!(i & k)) { \
    vec u = a[i], v = a[i + k];             \
    a[i] = TAKE(ints, u, v, LO);                  \
    a[i + k] = TAKE(ints, u, v, HI);              \
  }
  SWAP(1, LO1, HI1)
  SWAP(2, LO2, HI2)
#if LANES >= 8
  SWAP(4, LO4, HI4)
#endif
#if LANES >= 16
  SWAP(8, LO8, HI8)
#endif
}

/* Add to dv[0 ... LANES) the sums of LANES registers; each sum has the same tree of additions, whatever its place. */
INLINE void reduce(const float *from, float *dv, int64_t count) {
  float sums[LANES];
  for (int g = 0; g < LANES; g += HALF) {
    hvec a[HALF];
#pragma GCC unroll 8
    for (int i = 0; i < HALF; i++) {
      const float *at = from + (g + i) * LANES;
      a[i] = *(const hvec_at *)at;
      if (HALF < LANES) a[i] += *(const hvec_at *)(at + HALF); /* from memory: in registers it takes a shuffle */
    }
#define FOLD(n, LO, HI)                               \
  _Pragma("GCC unroll 8") for (int i = 0; i < n; i++) \
      a[i] = TAKE(hints, a[2 * i], a[2 * i + 1], LO) + TAKE(hints, a[2 * i], a[2 * i + 1], HI);
    FOLD(HALF / 2, HLO1, HHI1)
    FOLD(HALF / 4, HLO2, HHI2)
#if LANES >= 8
    FOLD(HALF / 8, HLO4, HHI4)
#endif
    *(hvec_at *)(sums + g) = a[0];
  }
  if (count >= LANES)
    *(vec_at *)dv += *(const vec_at *)sums;
  else /* what lies behind belongs to another thread */
    for (int64_t i = 0; i < count; i++) dv[i] += sums[i];
}

/* Rows of x, shape (rows, features), rows ld apart -> panel [features][PANEL]; missing rows become zeros. */
INLINE void pack_as(const char *x, int64_t ld, int64_t rows, int64_t features, float *panel, const int bf16) {
  const int64_t size = bf16 ? 2 : 4;
  for (int64_t t = 0; t < PANEL; t += LANES) {
    int64_t f = 0, here = rows - t < LANES ? rows - t : LANES;
    for (; f + LANES <= features; f += LANES) {
      vec a[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) a[i] = i < here ? load(x + ((t + i) * ld + f) * size, bf16) : (vec){0};
      transpose(a);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) *(vec_at *)(panel + (f + i) * PANEL + t) = a[i];
    }
    for (; f < features; f++)
      for (int64_t i = 0; i < LANES; i++) panel[f * PANEL + t + i] = i < here ? load1(x + (t + i) * ld * size, f, bf16) : 0;
  }
}

INLINE void unpack_as(const float *panel, int64_t rows, int64_t features, char *y, int64_t ld, const int bf16) {
  const int64_t size = bf16 ? 2 : 4;
  for (int64_t t = 0; t < PANEL && t < rows; t += LANES) {
    int64_t f = 0, here = rows - t < LANES ? rows - t : LANES;
    for (; f + LANES <= features; f += LANES) {
      vec a[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) a[i] = *(const vec_at *)(panel + (f + i) * PANEL + t);
      transpose(a);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
        if (i < here) store(y + ((t + i) * ld + f) * size, a[i], bf16);
    }
    for (; f < features; f++)
      for (int64_t i = 0; i < here; i++) store1(y + (t + i) * ld * size, f, panel[f * PANEL + t + i], bf16);
  }
}

static void pack(const char *x, int64_t ld, int64_t rows, int64_t features, float *panel, int bf16) {
  if (bf16) pack_as(x, ld, rows, features, panel, 1);
  else pack_as(x, ld, rows, features, panel, 0);
}

static void unpack(const float *panel, int64_t rows, int64_t features, char *y, int64_t ld, int bf16) {
  if (bf16) unpack_as(panel, rows, features, y, ld, 1);
  else unpack_as(panel, rows, features, y, ld, 0);
}

/* One call; Python fills it, in this order. */
typedef struct {
  int64_t tokens, in, out, bf16, parts;  /* rows; features; whether x, y, dy and dx are bfloat16; threads' shares */
  const char *x, *dy;                    /* shapes (tokens, in) and (tokens, out) */
  int64_t x_ld, dy_ld;                   /* numbers from row to row */
  char *y, *dx;                          /* contiguous; dx may be null */
  const float *bias, *values;            /* bias may be null; values row by row of W */
  int64_t blocks;                        /* of features, in the forward pass */
  const int32_t *begin, *col;            /* piece i = r * blocks + b of row r: begin[i] ... begin[i + 1] of values, col */
  const int32_t *crow_t, *row, *order;   /* the same weights column by column; value j there is values[order[j]] */
  float *dvalues, *dots;                 /* shape (live,): by rows, may be null; by columns, scratch */
  float *turned;                         /* shape (live,), scratch: values by columns */
  float *scratch;                        /* see the functions */
  int64_t share;                         /* floats of scratch that each part has for itself */
  void (*openmp)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel of the runtime that torch loaded */
} job_t;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Y of one panel: pieces of rows, block by block. */
static void rows_of(const job_t *job, const float *x, float *y) {
  for (int64_t block = 0; block < job->blocks; block++) {
    const int32_t *begin = job->begin + block;
    for (int64_t r = 0; r < job->out; r++, begin += job->blocks) {
      int64_t j = begin[0], stop = begin[1];
      float *to = y + r * PANEL;
      vec a[4], b[4] = {{0}, {0}, {0}, {0}}; /* two sums: an addition must not wait for the one before */
      if (block == 0) {
        for (int k = 0; k < 4; k++) a[k] = (vec){0} + (job->bias ? job->bias[r] : 0.0f);
      } else {
        if (j == stop) continue;
        for (int k = 0; k < 4; k++) a[k] = *(const vec_at *)(to + k * LANES);
      }
      for (; j + 1 < stop; j += 2) {
        const float *p = x + (int64_t)job->col[j] * PANEL, *q = x + (int64_t)job->col[j + 1] * PANEL;
        const float v = job->values[j], w = job->values[j + 1];
        for (int k = 0; k < 4; k++) a[k] += v * *(const vec_at *)(p + k * LANES);
        for (int k = 0; k < 4; k++) b[k] += w * *(const vec_at *)(q + k * LANES);
      }
      if (j < stop)
        for (int k = 0; k < 4; k++) a[k] += job->values[j] * *(const vec_at *)(x + (int64_t)job->col[j] * PANEL + k * LANES);
      for (int k = 0; k < 4; k++) *(vec_at *)(to + k * LANES) = a[k] + b[k];
    }
  }
}

#define WAITING 64 /* dot products that wait, not yet summed over lanes, when they are seen to */

/* dX and dV of one panel for columns first ... last of W. */
INLINE void columns_as(const job_t *job, const float *x, const float *dy, float *dx, float *waiting, int64_t first,
                       int64_t last, const int wants_dx, const int wants_dv) {
  int64_t slot = 0;
  float *dots = wants_dv ? job->dots + job->crow_t[first] : job->dots;
  for (int64_t c = first; c < last; c++) {
    vec a[4] = {{0}, {0}, {0}, {0}}, in[4];
    if (wants_dv)
      for (int k = 0; k < 4; k++) in[k] = *(const vec_at *)(x + c * PANEL + k * LANES);
    for (int64_t j = job->crow_t[c], stop = job->crow_t[c + 1]; j < stop; j++) {
      const float *p = dy + (int64_t)job->row[j] * PANEL;
      const vec p0 = *(const vec_at *)p, p1 = *(const vec_at *)(p + LANES);
      const vec p2 = *(const vec_at *)(p + 2 * LANES), p3 = *(const vec_at *)(p + 3 * LANES);
      if (wants_dx) {
        const float v = job->turned[j];
        a[0] += v * p0;
        a[1] += v * p1;
        a[2] += v * p2;
        a[3] += v * p3;
      }
      if (wants_dv) {
        *(vec_at *)(waiting + slot++ * LANES) = in[0] * p0 + in[1] * p1 + (in[2] * p2 + in[3] * p3);
        if (slot == WAITING) {
          for (int64_t i = 0; i < WAITING; i += LANES) reduce(waiting + i * LANES, dots + i, LANES);
          dots += WAITING;
          slot = 0;
        }
      }
    }
    if (wants_dx)
      for (int k = 0; k < 4; k++) *(vec_at *)(dx + (c - first) * PANEL + k * LANES) = a[k];
  }
  for (int64_t i = 0; i < slot; i += LANES) reduce(waiting + i * LANES, dots + i, slot - i);
}

static void columns(const job_t *job, const float *x, const float *dy, float *dx, float *waiting, int64_t c0, int64_t c1) {
  if (job->dx && job->dvalues) columns_as(job, x, dy, dx, waiting, c0, c1, 1, 1);
  else if (job->dx) columns_as(job, x, dy, dx, waiting, c0, c1, 1, 0);
  else columns_as(job, x, dy, dx, waiting, c0, c1, 0, 1);
}

static int64_t panels(const job_t *job) { return (job->tokens + PANEL - 1) / PANEL; }
static int64_t rows_in(const job_t *job, int64_t p) { return least(PANEL, job->tokens - p * PANEL); }

/* Parts share panels; scratch of each: panel of X, panel of Y. */
static void forward_part(const job_t *job, int64_t part) {
  const int64_t count = panels(job), size = job->bf16 ? 2 : 4;
  float *x = job->scratch + part * job->share, *y = x + job->in * PANEL;
  for (int64_t p = part * count / job->parts; p < (part + 1) * count / job->parts; p++) {
    pack(job->x + p * PANEL * job->x_ld * size, job->x_ld, rows_in(job, p), job->in, x, (int)job->bf16);
    rows_of(job, x, y);
    unpack(y, rows_in(job, p), job->out, job->y + p * PANEL * job->out * size, job->out, (int)job->bf16);
  }
}

/* Where panel p of X and dY is in scratch: all of them behind the parts' own, or one in turn where one part does all. */
static float *held(const job_t *job, int64_t p) {
  return job->scratch + job->parts * job->share + (job->parts > 1 ? p : 0) * (job->in + job->out) * PANEL;
}

static void pack_both(const job_t *job, int64_t p) {
  const int64_t size = job->bf16 ? 2 : 4;
  float *x = held(job, p), *dy = x + job->in * PANEL;
  if (job->dvalues) pack(job->x + p * PANEL * job->x_ld * size, job->x_ld, rows_in(job, p), job->in, x, (int)job->bf16);
  pack(job->dy + p * PANEL * job->dy_ld * size, job->dy_ld, rows_in(job, p), job->out, dy, (int)job->bf16);
}

static void pack_part(const job_t *job, int64_t part) {
  const int64_t count = panels(job);
  for (int64_t p = part * count / job->parts; p < (part + 1) * count / job->parts; p++) pack_both(job, p);
}

/* First column of a part: live weights are shared out evenly, in whole registers of columns. */
static int64_t column_of(const job_t *job, int64_t part) {
  if (part == job->parts) return job->in;
  const int64_t live = job->crow_t[job->in];
  int64_t low = 0, high = job->in;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (job->crow_t[middle] * job->parts < live * part) low = middle + 1;
    else high = middle;
  }
  return low / 16 * 16;
}

/* Parts share columns, so that no sum is shared; scratch of each: dots that wait, panel of dX. */
static void backward_part(const job_t *job, int64_t part) {
  const int64_t first = column_of(job, part), last = column_of(job, part + 1), size = job->bf16 ? 2 : 4;
  const int64_t begin = job->crow_t[first], end = job->crow_t[last];
  float *waiting = job->scratch + part * job->share, *dx = waiting + WAITING * LANES;
  if (job->dx)
    for (int64_t j = begin; j < end; j++) job->turned[j] = job->values[job->order[j]];
  if (job->dvalues) memset(job->dots + begin, 0, 4 * (size_t)(end - begin));
  for (int64_t p = 0; p < panels(job); p++) {
    if (job->parts == 1) pack_both(job, p);
    const float *x = held(job, p);
    columns(job, x, x + job->in * PANEL, dx, waiting, first, last);
    if (job->dx)
      unpack(dx, rows_in(job, p), last - first, job->dx + (p * PANEL * job->in + first) * size, job->in, (int)job->bf16);
  }
  if (job->dvalues)
    for (int64_t j = begin; j < end; j++) job->dvalues[job->order[j]] = job->dots[j];
}

typedef struct {
  const job_t *job;
  void (*work)(const job_t *, int64_t);
  atomic_int_fast64_t next;
} team_t;

/* What a part does follows from its number, so it does not matter which thread takes it, nor how many there are. */
static void *member(void *argument) {
  team_t *team = argument;
  for (int64_t part; (part = atomic_fetch_add(&team->next, 1)) < team->job->parts;) team->work(team->job, part);
  return NULL;
}

static void member_of_openmp(void *argument) { member(argument); }

static void share_out(const job_t *job, void (*work)(const job_t *, int64_t)) {
  team_t team = {job, work, 0};
  enum { MOST = 256 };
  pthread_t threads[MOST];
  int64_t started = 0;
  if (job->parts > 1 && job->openmp) {
    job->openmp(member_of_openmp, &team, (unsigned)job->parts, 0);
  } else {
    while (started < least(job->parts - 1, MOST) && !pthread_create(&threads[started], NULL, member, &team)) started++;
    member(&team);
    while (started) pthread_join(threads[--started], NULL);
  }
}

void sparing_forward(const job_t *job) { share_out(job, forward_part); }

void sparing_backward(const job_t *job) {
  if (job->parts > 1) share_out(job, pack_part);
  share_out(job, backward_part);
}

/* What Python must know of the build: floats of a panel's feature, floats that wait, size of the struct. */
int64_t sparing_panel(void) { return PANEL; }
int64_t sparing_waiting(void) { return WAITING * LANES; }
int64_t sparing_size(void) { return (int64_t)sizeof(job_t); }
