/* Random products of panels.c against sums in double, every array of exactly its size: for the sanitizers. */
#include "panels.c"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t state = 1;
static int64_t below(int64_t n) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (int64_t)((state >> 33) % (uint64_t)n);
}
static float number(void) { return (float)below(2001) / 1000 - 1; }

/* Arrays of floats at least one long, so that none is null; values that bfloat16 has. */
static float *floats(int64_t n, int rounded) {
  float *made = malloc(4 * (size_t)(n ? n : 1));
  for (int64_t i = 0; i < n; i++) made[i] = rounded ? (float)(below(129) - 64) / 64 : number();
  return made;
}
static void *typed(const float *from, int64_t n, int bf16) {
  uint16_t *half = malloc((size_t)(n ? n : 1) * (bf16 ? 2 : 4));
  if (!bf16) return memcpy(half, from, 4 * (size_t)n);
  for (int64_t i = 0; i < n; i++) memcpy(half + i, (const char *)(from + i) + 2, 2); /* exact by construction */
  return half;
}
static int32_t *ints_of(int64_t n) { return calloc((size_t)n + 1, 4); }

static int check(const char *what, double got, double want, double size, double unit) {
  if (fabs(got - want) <= unit * size + 1e-30) return 0;
  printf("%s: got %.9g, exact %.9g, terms add up to %.3g\n", what, got, want, size);
  return 1;
}

static int trial(void) {
  const int64_t n = below(4) ? below(150) : below(3), in = 1 + below(90), out = 1 + below(90), live_of = below(101);
  const int64_t x_ld = in + below(5), dy_ld = out + below(5), blocks = 1 + below(4), width = (in + blocks - 1) / blocks;
  const int bf16 = (int)below(2), wants = 1 + (int)below(3), biased = (int)below(2);
  char *mask = malloc((size_t)(in * out));
  int64_t live = 0;
  for (int64_t i = 0; i < in * out; i++) live += mask[i] = below(100) < live_of;
  int32_t *begin = ints_of(out * blocks), *crow_t = ints_of(in), *col = malloc(4 * (size_t)live + 4);
  int32_t *row = malloc(4 * (size_t)live + 4), *order = malloc(4 * (size_t)live + 4), *at = malloc(4 * (size_t)(in * out));
  int32_t j = 0;
  for (int64_t r = 0; r < out; r++)
    for (int64_t c = 0; c < in; c++)
      if (mask[r * in + c]) at[r * in + c] = j, col[j++] = (int32_t)c, begin[r * blocks + c / width + 1]++;
  for (int64_t i = 0; i < out * blocks; i++) begin[i + 1] += begin[i];
  j = 0;
  for (int64_t c = 0; c < in; c++) {
    for (int64_t r = 0; r < out; r++)
      if (mask[r * in + c]) order[j] = at[r * in + c], row[j++] = (int32_t)r;
    crow_t[c + 1] = j;
  }
  /* The last row ends where its numbers end, not its stride. */
  const int64_t sizes[2] = {n ? (n - 1) * x_ld + in : 0, n ? (n - 1) * dy_ld + out : 0};
  float *x = floats(sizes[0], bf16), *dy = floats(sizes[1], bf16), *values = floats(live, 0), *bias = floats(out, 0);
  void *x_in = typed(x, sizes[0], bf16), *dy_in = typed(dy, sizes[1], bf16);
  float *y = floats(n * out, 1), *dx = floats(n * in, 1), *dvalues = floats(live, 0), *dots = floats(live, 0);
  float *turned = floats(live, 0), *kept = NULL;
  void *y_out = typed(y, n * out, bf16), *dx_out = typed(dx, n * in, bf16);
  const int64_t share = WAITING * LANES + (in + out) * PANEL, count = (n + PANEL - 1) / PANEL;
  int bad = 0;
  for (int64_t parts = 1; parts <= 3; parts++) {
    float *scratch = floats(parts * share + (in + out) * PANEL * (parts > 1 ? count : 1), 0);
    job_t job = {n, in, out, bf16, parts, x_in, dy_in, x_ld, dy_ld, y_out, wants & 1 ? dx_out : NULL,
                 biased ? bias : NULL, values, blocks, begin, col, crow_t, row, order,
                 wants & 2 ? dvalues : NULL, dots, turned, scratch, share, NULL};
    sparing_forward(&job);
    sparing_backward(&job);
    if (parts == 1) kept = memcpy(malloc(4 * (size_t)live + 4), dvalues, 4 * (size_t)live);
    else if (memcmp(kept, dvalues, 4 * (size_t)live)) bad += !!printf("dV depends on the number of parts\n");
    free(scratch);
  }
  /* Each sum is off by at most its number of terms times the unit roundoff 2^-24; bfloat16 rounds once more, by 2^-8. */
  const double half = bf16 ? 0x1p-8 : 0;
  for (int64_t t = 0; t < n; t++)
    for (int64_t r = 0; r < out; r++) {
      double want = biased ? bias[r] : 0, size = fabs(want);
      for (int64_t c = 0; c < in; c++)
        if (mask[r * in + c]) want += (double)values[at[r * in + c]] * x[t * x_ld + c], size += fabs((double)values[at[r * in + c]] * x[t * x_ld + c]);
      bad += check("Y", load1(y_out, t * out + r, bf16), want, size, (double)(in + 2) * 0x1p-24 + half);
    }
  if (wants & 1)
    for (int64_t t = 0; t < n; t++)
      for (int64_t c = 0; c < in; c++) {
        double want = 0, size = 0;
        for (int64_t r = 0; r < out; r++)
          if (mask[r * in + c]) want += (double)values[at[r * in + c]] * dy[t * dy_ld + r], size += fabs((double)values[at[r * in + c]] * dy[t * dy_ld + r]);
        bad += check("dX", load1(dx_out, t * in + c, bf16), want, size, (double)(out + 1) * 0x1p-24 + half);
      }
  if (wants & 2)
    for (int64_t i = 0; i < in * out; i++)
      if (mask[i]) {
        double want = 0, size = 0;
        for (int64_t t = 0; t < n; t++) want += (double)dy[t * dy_ld + i / in] * x[t * x_ld + i % in], size += fabs((double)dy[t * dy_ld + i / in] * x[t * x_ld + i % in]);
        bad += check("dV", dvalues[at[i]], want, size, (double)(n + 1) * 0x1p-24);
      }
  void *all[] = {mask, begin, crow_t, col, row, order, at, x, dy, values, bias, x_in, dy_in, y, dx, dvalues, dots, turned, kept, y_out, dx_out};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  return bad;
}

int main(int argc, char **argv) {
  const int trials = argc > 1 ? atoi(argv[1]) : 100;
  int bad = 0;
  for (int i = 0; i < trials; i++) bad += trial();
  printf("%d trials of %d lanes, %d wrong\n", trials, LANES, bad);
  return bad != 0;
}
