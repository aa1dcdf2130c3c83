/* Simulated annealing of a step of Megatron's 1F1B, for best_known.py; see there.
 * place[i] = first rank * K + slot of sample i, size[rank * K + slot]: ranks that share that row;
 * both in and out. Costs are those on all stages but the last one, and those there. `most` ranks
 * may share a row; where it is 1, a row keeps a sample. Returns the end of the best step found. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define MAXD 8
#define MAXK 300
#define MAXP 8
typedef struct { int size, n, room, j, r; int *s; double sum, last; long tokens; } Row;
typedef struct { int kind, a, b; Row *row; } Op;
typedef double Clock[MAXP][MAXD];
static uint64_t S;
static int D, K, P, most_ranks, *pos, ops, born_n, dead_n, from;
static const double *cost, *last_cost;
static const long *len;
static double back, fixed, last_fixed, doubling, share[4], beta, c[MAXK][MAXD], l[MAXK][MAXD], ends[MAXD];
static Row **row_of, *grid[MAXK][MAXD], *born[1024], *dead[1024];
static Op journal[20000];
static Clock clocks[MAXK + MAXP + 1], kept[MAXK + MAXP + 1];

static uint32_t rnd(void) { S ^= S << 13; S ^= S >> 7; S ^= S << 17; return (uint32_t)(S >> 32); }
static int below(int n) { return (int)(((uint64_t)rnd() * n) >> 32); }
static double uniform(void) { return rnd() / 4294967296.0; }
static int lg(int size) { return size == 1 ? 0 : size == 2 ? 1 : size == 4 ? 2 : 3; }
static long padded(int i, int size) { long m = size > 1 ? 2 * size : 1; return (len[i] + m - 1) / m * m; }

static Row *new_row(int size) {
  Row *w = calloc(1, sizeof(Row));
  w->size = size; w->room = 8; w->s = malloc(8 * sizeof(int));
  return w;
}
static void free_row(Row *w) { free(w->s); free(w); }
static void add(int i, Row *w) {
  if (w->n == w->room) w->s = realloc(w->s, (w->room *= 2) * sizeof(int));
  pos[i] = w->n; w->s[w->n++] = i; row_of[i] = w; w->sum += cost[i]; w->last += last_cost[i];
  w->tokens += padded(i, w->size);
}
static void del(int i) {
  Row *w = row_of[i];
  int last = w->s[--w->n];
  w->s[pos[i]] = last; pos[last] = pos[i]; w->tokens -= padded(i, w->size);
  w->sum = w->n ? w->sum - cost[i] : 0;
  w->last = w->n ? w->last - last_cost[i] : 0;
}
/* Changes are noted, and undone in reverse or committed. */
static void move(int i, Row *w) { journal[ops++] = (Op){0, i, 0, row_of[i]}; del(i); add(i, w); }
static void put(int j, int r, Row *w) {
  journal[ops++] = (Op){1, j, r, grid[j][r]}; grid[j][r] = w;
  if (j < from) from = j;
}
static void undo(void) {
  while (ops--) {
    Op *o = &journal[ops];
    if (o->kind) grid[o->a][o->b] = o->row; else { del(o->a); add(o->a, o->row); }
  }
  while (born_n) free_row(born[--born_n]);
  ops = dead_n = 0;
}
static void commit(void) { while (dead_n) free_row(dead[--dead_n]); ops = born_n = 0; }
static void set_costs(int j) {
  for (int r = 0; r < D; r += grid[j][r]->size) {
    Row *w = grid[j][r];
    w->j = j; w->r = r;
    double shared = doubling * lg(w->size), part = share[lg(w->size)];
    for (int q = 0; q < w->size; q++) {
      c[j][r + q] = fixed + shared + part * w->sum;
      l[j][r + q] = last_fixed + shared + part * w->last;
    }
  }
}
static void wait_for_each_other(double *start, int j) {
  for (int r = 0; r < D; r += grid[j][r]->size) {
    double latest = start[r];
    for (int q = 1; q < grid[j][r]->size; q++) if (start[r + q] > latest) latest = start[r + q];
    for (int q = 0; q < grid[j][r]->size; q++) start[r + q] = latest;
  }
}
static void simulate(int first) { /* clocks[n] is before round n */
  int last = P - 1;
  for (int n = first; n < K + last; n++) {
    double(*b)[MAXD] = clocks[n], (*a)[MAXD] = clocks[n + 1], start[MAXD];
    memcpy(a, b, sizeof(double) * P * MAXD);
    memset(start, 0, sizeof start);
    for (int s = 0; n < K && s < P; s++) {
      for (int r = 0; r < D; r++) start[r] = a[s][r] > start[r] ? a[s][r] : start[r];
      wait_for_each_other(start, n);
      for (int r = 0; r < D; r++) a[s][r] = start[r] += (s < last ? c : l)[n][r];
    }
    for (int s = 0; s < P; s++) {
      int due = n - last + s;
      if (due < 0 || due >= K) continue;
      for (int r = 0; r < D; r++) start[r] = s < last && b[s + 1][r] > a[s][r] ? b[s + 1][r] : a[s][r];
      wait_for_each_other(start, due);
      for (int r = 0; r < D; r++) a[s][r] = start[r] + back * (s < last ? c : l)[due][r];
    }
  }
  memcpy(ends, clocks[K + last][0], sizeof ends);
}
static double latest(void) { double m = 0; for (int r = 0; r < D; r++) if (ends[r] > m) m = ends[r]; return m; }
static double energy(void) {
  double m = latest(), sum = 0;
  for (int r = 0; r < D; r++) sum += exp(beta * (ends[r] - m));
  return m + log(sum / D) / beta;
}
static int whole(int j, int r0, int z) { /* no row of these ranks is on others as well */
  for (int r = r0; r < r0 + z; r += grid[j][r]->size) if (grid[j][r]->size > z) return 0;
  return 1;
}
static int fits(Row *w, long cap) { return w->tokens <= cap * w->size; }

static int move_sample(int n, long cap) {
  int i = below(n), slot = below(K), rank = below(D), other = -1;
  if (!below(3)) { /* of the latest rank */
    int end = 0;
    for (int r = 1; r < D; r++) if (ends[r] > ends[end]) end = r;
    Row *of = grid[below(K)][end];
    if (of->n) i = of->s[below(of->n)];
  }
  Row *a = row_of[i], *w;
  if (!below(3)) rank = a->r + below(a->size);
  if ((w = grid[slot][rank]) == a) return 0;
  if (below(2)) {
    if (!w->n || cost[other = w->s[below(w->n)]] == cost[i]) return 0;
    move(other, a);
  } else if (most_ranks == 1 && a->n == 1) return 0;
  move(i, w);
  from = a->j < w->j ? a->j : w->j;
  return fits(w, cap) && (other < 0 || fits(a, cap));
}
static int swap_blocks(void) { /* of two slots, or of two blocks of ranks; or shift a block's slots */
  int z = 1 << below(most_ranks == 1 ? 1 : 4), r0 = below(D / z) * z, r1 = below(3) ? r0 : below(D / z) * z, j0 = below(K), j1 = below(K);
  if (below(2)) j1 = j0 + below(9) - 4;
  if (!below(4) && r0 != r1) j1 = j0;
  if (j1 < 0 || j1 >= K || (j0 == j1 && r0 == r1) || !whole(j0, r0, z) || !whole(j1, r1, z)) return 0;
  if (r0 == r1 && below(2)) {
    int by = j0 < j1 ? 1 : -1;
    Row *first[MAXD];
    for (int j = j0; j != j1 + by; j += by) if (!whole(j, r0, z)) return 0;
    memcpy(first, &grid[j0][r0], z * sizeof(Row *));
    for (int j = j0; j != j1; j += by) for (int q = 0; q < z; q++) put(j, r0 + q, grid[j + by][r0 + q]);
    for (int q = 0; q < z; q++) put(j1, r0 + q, first[q]);
  } else {
    for (int q = 0; q < z; q++) {
      Row *x = grid[j0][r0 + q], *y = grid[j1][r1 + q];
      put(j0, r0 + q, y); put(j1, r1 + q, x);
    }
  }
  return 1;
}
static int merge_rows(int n, long cap) { /* with what is beside it, which may go to other slots */
  Row *a = below(2) ? row_of[below(n)] : grid[below(K)][below(D)];
  int z = a->size, j = a->j, r0 = a->r & ~(2 * z - 1), beside = r0 == a->r ? r0 + z : r0, away = below(2);
  if (2 * z > most_ranks || !whole(j, beside, z)) return 0;
  Row *w = born[born_n++] = new_row(2 * z);
  for (int r = beside; r < beside + z;) {
    Row *o = grid[j][r];
    while (o->n) {
      int i = o->s[o->n - 1];
      Row *to = w;
      for (int t = 0; away && t < 3; t++) {
        Row *y = grid[below(K)][r];
        if (y->j != j && y->tokens + padded(i, y->size) <= cap * y->size &&
            (to == w || y->sum * share[lg(y->size)] < to->sum * share[lg(to->size)])) to = y;
      }
      if (to != w && to->j < from) from = to->j;
      move(i, to);
      if (ops > 19000) return 0;
    }
    dead[dead_n++] = o; r += o->size;
  }
  while (a->n) move(a->s[a->n - 1], w);
  dead[dead_n++] = a;
  for (int q = 0; q < 2 * z; q++) put(j, r0 + q, w);
  return fits(w, cap);
}
static int split_row(int n, long cap) { /* its samples, or with others beside its only one */
  Row *a = below(2) ? row_of[below(n)] : grid[below(K)][below(D)];
  int z = a->size, j = a->j, r0 = a->r, longest, how = below(3);
  if (z == 1 || !a->n) return 0;
  Row *x = born[born_n++] = new_row(z / 2), *y = born[born_n++] = new_row(z / 2);
  longest = a->s[0];
  for (int q = 1; q < a->n; q++) if (cost[a->s[q]] > cost[longest]) longest = a->s[q];
  while (a->n) {
    int i = a->s[a->n - 1];
    move(i, (how == 0 ? i == longest : how == 1 ? x->sum < y->sum : below(2)) ? x : y);
  }
  dead[dead_n++] = a;
  if (!x->n || !y->n) {
    Row *empty = x->n ? y : x;
    for (int q = below(4); q > 0; q--) {
      int i = below(n);
      if (row_of[i] == x || row_of[i] == y || cost[i] > 0.3 * cost[longest]) continue;
      if (row_of[i]->j < from) from = row_of[i]->j;
      move(i, empty);
    }
  }
  if (below(2)) { Row *other = x; x = y; y = other; }
  for (int q = 0; q < z / 2; q++) { put(j, r0 + q, x); put(j, r0 + z / 2 + q, y); }
  return fits(x, cap) && fits(y, cap);
}

double anneal(int n, const double *costs, const double *last_costs, const long *lengths, long cap, int ranks,
              int stages, int slots, int most, double ratio, double per_row, double per_last_row, double overhead,
              double per_doubling, int *place, int *size, long moves, double hot, double cold, uint64_t seed) {
  cost = costs; last_cost = last_costs; len = lengths; D = ranks; P = stages; K = slots; most_ranks = most;
  back = ratio; fixed = per_row; last_fixed = per_last_row; doubling = per_doubling;
  share[0] = 1;
  for (int i = 1; i < 4; i++) share[i] = share[i - 1] * (1 + overhead) / 2;
  S = seed * 2654435761u + 88172645463325252ull;
  for (int i = 0; i < 10; i++) rnd();
  row_of = malloc(n * sizeof(Row *)); pos = malloc(n * sizeof(int));
  for (int j = 0; j < K; j++) for (int r = 0; r < D;) {
    Row *w = new_row(size[r * K + j]);
    for (int q = 0; q < w->size; q++) grid[j][r + q] = w;
    r += w->size;
  }
  for (int i = 0; i < n; i++) add(i, grid[place[i] % K][place[i] / K]);
  for (int j = 0; j < K; j++) set_costs(j);
  memset(clocks, 0, sizeof clocks);
  simulate(0);
  double start = latest(), best = start;
  beta = 300 / start;
  double now = energy();
  ops = born_n = dead_n = 0;
  for (long it = 0; it < moves; it++) {
    double heat = start * hot * pow(cold / hot, (double)it / moves);
    int kind = below(most == 1 ? 82 : 100);
    from = K;
    int legal = kind < 70 ? move_sample(n, cap) : kind < 82 ? swap_blocks() : kind < 91 ? merge_rows(n, cap) : split_row(n, cap);
    if (!legal) { undo(); continue; }
    for (int j = from; j < K; j++) set_costs(j);
    memcpy(kept[from + 1], clocks[from + 1], sizeof(Clock) * (K + P - 1 - from));
    simulate(from);
    double then = energy();
    if (then > now && uniform() >= exp((now - then) / heat)) {
      undo();
      for (int j = from; j < K; j++) set_costs(j);
      memcpy(clocks[from + 1], kept[from + 1], sizeof(Clock) * (K + P - 1 - from));
      continue;
    }
    commit();
    now = then;
    if (latest() < best * (1 - 1e-9)) {
      best = latest();
      for (int j = 0; j < K; j++) for (int r = 0; r < D; r++) size[r * K + j] = grid[j][r]->size;
      for (int i = 0; i < n; i++) place[i] = row_of[i]->r * K + row_of[i]->j;
    }
  }
  for (int j = 0; j < K; j++) for (int r = 0; r < D;) { Row *w = grid[j][r]; r += w->size; free_row(w); }
  free(row_of); free(pos);
  return best;
}
