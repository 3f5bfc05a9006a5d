// The parts of training that plain torch does slowly on a CPU: expert routing, the experts on sorted tokens, causal
// attention over sequences of different lengths laid end to end, norms, and Muon's step. Each has a plain twin in
// experts.py or optim.py.
//
// Row-major C[M,N] = A[M,K] B is computed as the column-major product of the transposes, as BLAS wants it.
#include <ATen/Parallel.h>
#include <torch/extension.h>

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

using at::Tensor;
static constexpr char N = 'n', T = 't';

// The single-precision product of the BLAS inside libtorch; inside an OpenMP region it runs on the calling thread.
extern "C" void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
      const int*,
                       const float*, const int*, const float*, float*, const int*);

static void gemm(char ta, char tb, int m, int n, int k, float alpha, const float* a, int lda, const float* b,
      int ldb, float beta,
                 float* c, int ldc) {
  sgemm_(&ta, &tb, &m, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &ldc);
}

// Expert choice of DeepSeek-V3: the groups with the largest sums of their two best scores, then the k best experts
// inside these groups.
Tensor route(const Tensor& biased, int64_t num_groups, int64_t groups_kept, int64_t k) {
  const int64_t tokens = biased.size(0), experts = biased.size(1), width = experts / num_groups;
  Tensor chosen = at::empty({tokens, k}, biased.options().dtype(at::kLong));
  const float* s = biased.data_ptr<float>();
  int64_t* out = chosen.data_ptr<int64_t>();
  at::parallel_for(0, tokens, 64, [&](int64_t begin, int64_t end) {
    std::vector<std::pair<float, int64_t>> groups(num_groups), pool(groups_kept * width);
    for (int64_t t = begin; t < end; t++) {
      const float* row = s + t * experts;
      for (int64_t g = 0; g < num_groups; g++) {
        float a = -std::numeric_limits<float>::infinity(), b = a;
        for (int64_t e = g * width; e < (g + 1) * width; e++) {
          const float v = row[e];
          if (v > a) { b = a; a = v; } else if (v > b) { b = v; }
        }
        groups[g] = {-(a + b), g};
      }
      std::partial_sort(groups.begin(), groups.begin() + groups_kept, groups.end());
      int64_t n = 0;
      for (int64_t j = 0; j < groups_kept; j++)
        for (int64_t e = groups[j].second * width; e < (groups[j].second + 1) * width; e++) pool[n++] = {-row[e], e};
      std::nth_element(pool.begin(), pool.begin() + k - 1, pool.end());
      for (int64_t j = 0; j < k; j++) out[t * k + j] = pool[j].second;
    }
  });
  return chosen;
}

// Pairs (token * k + choice) grouped by expert, and the start of each expert's pairs.
std::vector<Tensor> sort_by_expert(const Tensor& chosen, int64_t experts) {
  const int64_t pairs = chosen.numel();
  Tensor order = at::empty({pairs}, chosen.options()), starts = at::zeros({experts + 1}, chosen.options());
  const int64_t* c = chosen.data_ptr<int64_t>();
  int64_t *o = order.data_ptr<int64_t>(), *s = starts.data_ptr<int64_t>();
  for (int64_t i = 0; i < pairs; i++) s[c[i] + 1]++;
  for (int64_t e = 0; e < experts; e++) s[e + 1] += s[e];
  std::vector<int64_t> at(s, s + experts);
  for (int64_t i = 0; i < pairs; i++) o[at[c[i]]++] = i;
  return {order, starts};
}

static Tensor sum_first(const Tensor& parts) { return parts.size(0) == 1 ? parts[0] : parts.sum(0); }

// x [tokens,D], gate_up [E,2F,D], down [E,D,F], weights [tokens,k] -> out [tokens,D], and the pre-activations kept.
std::vector<Tensor> experts_forward(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& weights,
                                    const Tensor& order, const Tensor& starts) {
  const int64_t tokens = x.size(0), D = x.size(1), E = gate_up.size(0), F = down.size(2), k = weights.size(1);
  const int threads = at::get_num_threads();
  Tensor out = at::zeros({threads, tokens, D}, x.options()), kept = at::empty({tokens * k, 2 * F}, x.options());
  const float *xp = x.data_ptr<float>(), *gu = gate_up.data_ptr<float>(), *dn = down.data_ptr<float>();
  const float* w = weights.data_ptr<float>();
  const int64_t *o = order.data_ptr<int64_t>(), *s = starts.data_ptr<int64_t>();
  float *op = out.data_ptr<float>(), *kp = kept.data_ptr<float>();
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> rows, hidden, y;
    float* mine = op + omp_get_thread_num() * tokens * D;
#pragma omp for schedule(dynamic, 4)
    for (int64_t e = 0; e < E; e++) {
      const int64_t m = s[e + 1] - s[e];
      if (m == 0) continue;
      const int64_t* pair = o + s[e];
      rows.resize(m * D); hidden.resize(m * F); y.resize(m * D);
      for (int64_t i = 0; i < m; i++) std::memcpy(&rows[i * D], xp + pair[i] / k * D, D * sizeof(float));
      float* pre = kp + s[e] * 2 * F;
      gemm(T, N, 2 * F, m, D, 1.f, gu + e * 2 * F * D, D, rows.data(), D, 0.f, pre, 2 * F);
      for (int64_t i = 0; i < m; i++) {
        const float* p = pre + i * 2 * F;
        float* h = &hidden[i * F];
        for (int64_t f = 0; f < F; f++) h[f] = p[f] / (1.f + std::exp(-p[f])) * p[F + f];
      }
      gemm(T, N, D, m, F, 1.f, dn + e * D * F, F, hidden.data(), F, 0.f, y.data(), D);
      for (int64_t i = 0; i < m; i++) {
        const float c = w[pair[i]];
        float* to = mine + pair[i] / k * D;
        for (int64_t d = 0; d < D; d++) to[d] += c * y[i * D + d];
      }
    }
  }
  return {sum_first(out), kept};
}

// Gradients of x, gate_up, down and weights. y itself is never needed: <dout, y> = <dout down, hidden>.
std::vector<Tensor> experts_backward(const Tensor& dout, const Tensor& x, const Tensor& gate_up, const Tensor& down,
                                     const Tensor& weights, const Tensor& order, const Tensor& starts,
                                           const Tensor& kept) {
  const int64_t tokens = x.size(0), D = x.size(1), E = gate_up.size(0), F = down.size(2), k = weights.size(1);
  const int threads = at::get_num_threads();
  Tensor dx = at::zeros({threads, tokens, D}, x.options()), dgu = at::empty_like(gate_up), ddn = at::empty_like(down);
  Tensor dw = at::empty_like(weights);
  const float *gp = dout.data_ptr<float>(), *xp = x.data_ptr<float>(), *gu = gate_up.data_ptr<float>();
  const float *dn = down.data_ptr<float>(), *w = weights.data_ptr<float>(), *kp = kept.data_ptr<float>();
  const int64_t *o = order.data_ptr<int64_t>(), *s = starts.data_ptr<int64_t>();
  float *dxp = dx.data_ptr<float>(), *dgp = dgu.data_ptr<float>(), *ddp = ddn.data_ptr<float>(),
        *dwp = dw.data_ptr<float>();
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> rows, grads, hidden, dh, dpre, back;
    float* mine = dxp + omp_get_thread_num() * tokens * D;
#pragma omp for schedule(dynamic, 4)
    for (int64_t e = 0; e < E; e++) {
      const int64_t m = s[e + 1] - s[e];
      float *dgu_e = dgp + e * 2 * F * D, *ddn_e = ddp + e * D * F;
      if (m == 0) {
        std::memset(dgu_e, 0, 2 * F * D * sizeof(float));
        std::memset(ddn_e, 0, D * F * sizeof(float));
        continue;
      }
      const int64_t* pair = o + s[e];
      rows.resize(m * D); grads.resize(m * D); hidden.resize(m * F); dh.resize(m * F); dpre.resize(m * 2 * F);
      back.resize(m * D);
      for (int64_t i = 0; i < m; i++) {
        std::memcpy(&rows[i * D], xp + pair[i] / k * D, D * sizeof(float));
        std::memcpy(&grads[i * D], gp + pair[i] / k * D, D * sizeof(float));
      }
      gemm(N, N, F, m, D, 1.f, dn + e * D * F, F, grads.data(), D, 0.f, dh.data(), F);
      for (int64_t i = 0; i < m; i++) {
        const float *p = kp + (s[e] + i) * 2 * F, c = w[pair[i]];
        float *h = &hidden[i * F], *g = &dh[i * F], *dp = &dpre[i * 2 * F], dot = 0.f;
        for (int64_t f = 0; f < F; f++) {
          const float sig = 1.f / (1.f + std::exp(-p[f])), act = p[f] * sig;
          const float full = act * p[F + f];
          dot += full * g[f];
          h[f] = c * full;
          dp[f] = c * g[f] * p[F + f] * (sig + act * (1.f - sig));
          dp[F + f] = c * g[f] * act;
        }
        dwp[pair[i]] = dot;
      }
      gemm(N, T, F, D, m, 1.f, hidden.data(), F, grads.data(), D, 0.f, ddn_e, F);
      gemm(N, T, D, 2 * F, m, 1.f, rows.data(), D, dpre.data(), 2 * F, 0.f, dgu_e, D);
      gemm(N, N, D, m, 2 * F, 1.f, gu + e * 2 * F * D, D, dpre.data(), 2 * F, 0.f, back.data(), D);
      for (int64_t i = 0; i < m; i++) {
        float* to = mine + pair[i] / k * D;
        for (int64_t d = 0; d < D; d++) to[d] += back[i * D + d];
      }
    }
  }
  return {sum_first(dx), dgu, ddn, dw};
}

static constexpr int64_t BLOCK = 64;  // Number of query rows at a time: few, so that the scores stay in the cache.

// p = softmax of the causal scores of query rows r0..r1 over keys 0..r1, as rows of length r1.
static void scores_softmax(const float* q, const float* key, float* p, float* lse, int64_t r0, int64_t r1, int64_t dk,
                           int64_t stride, float scale, bool have_lse) {
  gemm(T, N, r1, r1 - r0, dk, scale, key, stride, q + r0 * stride, stride, 0.f, p, r1);
  for (int64_t r = r0; r < r1; r++) {
    float* row = p + (r - r0) * r1;
    if (!have_lse) {
      float top = row[0], sum = 0.f;
      for (int64_t j = 1; j <= r; j++) top = std::max(top, row[j]);
      for (int64_t j = 0; j <= r; j++) sum += std::exp(row[j] - top);
      lse[r] = top + std::log(sum);
    }
    const float shift = lse[r];
    for (int64_t j = 0; j <= r; j++) row[j] = std::exp(row[j] - shift);
    for (int64_t j = r + 1; j < r1; j++) row[j] = 0.f;
  }
}

// q,k [tokens,H,dk], v [tokens,H,dv]; `bounds`: start of each sequence, and the end -> out, lse [H,tokens].
std::vector<Tensor> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bounds,
      double scale) {
  const int64_t tokens = q.size(0), H = q.size(1), dk = q.size(2), dv = v.size(2), num = bounds.numel() - 1;
  Tensor out = at::empty({tokens, H, dv}, q.options()), lse = at::empty({H, tokens}, q.options());
  const int64_t* b = bounds.data_ptr<int64_t>();
  const float *qp = q.data_ptr<float>(), *kp = k.data_ptr<float>(), *vp = v.data_ptr<float>();
  float *op = out.data_ptr<float>(), *lp = lse.data_ptr<float>();
#pragma omp parallel num_threads(at::get_num_threads())
  {
    std::vector<float> p;
#pragma omp for schedule(dynamic, 2)
    for (int64_t item = 0; item < num * H; item++) {
      const int64_t h = item % H, s0 = b[item / H], n = b[item / H + 1] - s0;
      p.resize(BLOCK * n);
      for (int64_t r0 = 0; r0 < n; r0 += BLOCK) {
        const int64_t r1 = std::min(n, r0 + BLOCK);
        scores_softmax(qp + (s0 * H + h) * dk, kp + (s0 * H + h) * dk, p.data(), lp + h * tokens + s0, r0, r1, dk,
              H * dk, scale, false);
        gemm(N, N, dv, r1 - r0, r1, 1.f, vp + (s0 * H + h) * dv, H * dv, p.data(), r1, 0.f,
              op + ((s0 + r0) * H + h) * dv, H * dv);
      }
    }
  }
  return {out, lse};
}

std::vector<Tensor> attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
      const Tensor& out,
                                       const Tensor& lse, const Tensor& bounds, double scale) {
  const int64_t tokens = q.size(0), H = q.size(1), dk = q.size(2), dv = v.size(2), num = bounds.numel() - 1;
  Tensor dq = at::empty_like(q), dkey = at::zeros_like(k), dval = at::zeros_like(v);
  const int64_t* b = bounds.data_ptr<int64_t>();
  const float *gp = dout.data_ptr<float>(), *qp = q.data_ptr<float>(), *kp = k.data_ptr<float>(),
        *vp = v.data_ptr<float>();
  const float* op = out.data_ptr<float>();
  float *lp = lse.data_ptr<float>(), *dqp = dq.data_ptr<float>(), *dkp = dkey.data_ptr<float>(),
        *dvp = dval.data_ptr<float>();
#pragma omp parallel num_threads(at::get_num_threads())
  {
    std::vector<float> p, dp;
#pragma omp for schedule(dynamic, 2)
    for (int64_t item = 0; item < num * H; item++) {
      const int64_t h = item % H, s0 = b[item / H], n = b[item / H + 1] - s0;
      p.resize(BLOCK * n); dp.resize(BLOCK * n);
      for (int64_t r0 = 0; r0 < n; r0 += BLOCK) {
        const int64_t r1 = std::min(n, r0 + BLOCK), rows = r1 - r0, row0 = ((s0 + r0) * H + h), all0 = s0 * H + h;
        scores_softmax(qp + all0 * dk, kp + all0 * dk, p.data(), lp + h * tokens + s0, r0, r1, dk, H * dk, scale,
              true);
        gemm(N, T, dv, r1, rows, 1.f, gp + row0 * dv, H * dv, p.data(), r1, 1.f, dvp + all0 * dv, H * dv);
        gemm(T, N, r1, rows, dv, 1.f, vp + all0 * dv, H * dv, gp + row0 * dv, H * dv, 0.f, dp.data(), r1);
        for (int64_t r = 0; r < rows; r++) {
          const float *g = gp + (row0 + r * H) * dv, *o = op + (row0 + r * H) * dv;
          float delta = 0.f;
          for (int64_t d = 0; d < dv; d++) delta += g[d] * o[d];
          for (int64_t j = 0; j < r1; j++) dp[r * r1 + j] = p[r * r1 + j] * (dp[r * r1 + j] - delta);
        }
        gemm(N, N, dk, rows, r1, (float)scale, kp + all0 * dk, H * dk, dp.data(), r1, 0.f, dqp + row0 * dk, H * dk);
        gemm(N, T, dk, r1, rows, (float)scale, qp + row0 * dk, H * dk, dp.data(), r1, 1.f, dkp + all0 * dk, H * dk);
      }
    }
  }
  return {dq, dkey, dval};
}

// y = x / rms(x) * w over the last dimension; keeps 1 / rms of every row.
std::vector<Tensor> norm_forward(const Tensor& x, const Tensor& weight, double eps) {
  const int64_t rows = x.size(0), D = x.size(1);
  Tensor y = at::empty_like(x), inverse = at::empty({rows}, x.options());
  const float *xp = x.data_ptr<float>(), *w = weight.data_ptr<float>();
  float *yp = y.data_ptr<float>(), *ip = inverse.data_ptr<float>();
  at::parallel_for(0, rows, 256, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      float sum = 0.f;
      for (int64_t d = 0; d < D; d++) sum += xp[r * D + d] * xp[r * D + d];
      const float c = ip[r] = 1.f / std::sqrt(sum / D + (float)eps);
      for (int64_t d = 0; d < D; d++) yp[r * D + d] = xp[r * D + d] * c * w[d];
    }
  });
  return {y, inverse};
}

std::vector<Tensor> norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& inverse) {
  const int64_t rows = x.size(0), D = x.size(1);
  const int threads = at::get_num_threads();
  Tensor dx = at::empty_like(x), dw = at::zeros({threads, D}, x.options());
  const float *gp = dy.data_ptr<float>(), *xp = x.data_ptr<float>(), *w = weight.data_ptr<float>(),
        *ip = inverse.data_ptr<float>();
  float *dxp = dx.data_ptr<float>(), *dwp = dw.data_ptr<float>();
#pragma omp parallel num_threads(threads)
  {
    float* mine = dwp + omp_get_thread_num() * D;
#pragma omp for
    for (int64_t r = 0; r < rows; r++) {
      const float *g = gp + r * D, *v = xp + r * D, c = ip[r];
      float dot = 0.f;
      for (int64_t d = 0; d < D; d++) {
        dot += g[d] * w[d] * v[d];
        mine[d] += g[d] * v[d] * c;
      }
      dot *= c * c / D;
      for (int64_t d = 0; d < D; d++) dxp[r * D + d] = c * (g[d] * w[d] - v[d] * dot);
    }
  }
  return {dx, dw.sum(0)};
}

// One Muon step. Each parameter holds matrices one behind the other; `all_rows` has the number of rows of a matrix of
// each parameter. One thread computes a matrix, inside the cache.
void muon_step(const std::vector<Tensor>& params, const std::vector<Tensor>& grads, const std::vector<Tensor>& buffers,
               const std::vector<int64_t>& all_rows, double lr, double momentum, double weight_decay) {
  struct Matrix {
    int64_t rows, cols;
    float *param, *buffer;
    const float* grad;
    int64_t side() const { return std::min(rows, cols); }
    int64_t size() const { return rows * cols; }
  };
  std::vector<Matrix> matrices;
  for (size_t t = 0; t < params.size(); t++) {
    const int64_t rows = all_rows[t], cols = params[t].size(-1);
    for (int64_t at = 0; at < params[t].numel(); at += rows * cols)
      matrices.push_back({rows, cols, params[t].data_ptr<float>() + at, buffers[t].data_ptr<float>() + at,
                          grads[t].data_ptr<float>() + at});
  }
  // Large matrices first, so that no thread still computes one when the others have finished.
  std::stable_sort(matrices.begin(), matrices.end(),
                   [](const Matrix& one, const Matrix& other) { return one.side() > other.side(); });
  const float mu = momentum, keep = 1.0 - lr * weight_decay;
#pragma omp parallel num_threads(at::get_num_threads())
  {
    std::vector<float> x, y, a, b, f, all;
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < matrices.size(); i++) {
      const auto [rows, cols, p, m, g] = matrices[i];
      const int64_t size = matrices[i].size(), side = matrices[i].side(), square = side * side;
      const float move = lr * 0.2 * std::sqrt((double)std::max(rows, cols));
      for (auto* each : {&x, &y}) each->resize(size);
      for (auto* each : {&a, &b, &f, &all}) each->resize(square);
      const auto product = [side](const std::vector<float>& left, const std::vector<float>& right,
                                  std::vector<float>& out) {
        gemm(N, N, side, side, side, 1.f, left.data(), side, right.data(), side, 0.f, out.data(), side);
      };
      float sum = 0.f;
      for (int64_t j = 0; j < size; j++) {
        m[j] += (1.f - mu) * (g[j] - m[j]);
        x[j] = g[j] + mu * (m[j] - g[j]);
        sum += x[j] * x[j];
      }
      const float inverse = 1.f / (std::sqrt(sum) + 1e-12f);
      for (int64_t j = 0; j < size; j++) x[j] *= inverse;
      // Each Newton-Schulz step multiplies x by a polynomial f of a = x x^T. All of them are polynomials of
      // the first a, so they commute and stay symmetric: the steps are taken on the short side alone, and x
      // is multiplied once by their product `all`. That is half the work.
      if (rows <= cols) gemm(T, N, side, side, cols, 1.f, x.data(), cols, x.data(), cols, 0.f, a.data(), side);
      else gemm(N, T, side, side, rows, 1.f, x.data(), cols, x.data(), cols, 0.f, a.data(), side);
      for (int step = 0; step < 5; step++) {
        product(a, a, f);
        for (int64_t j = 0; j < square; j++) f[j] = 2.0315f * f[j] - 4.7750f * a[j];
        for (int64_t j = 0; j < side; j++) f[j * side + j] += 3.4445f;
        if (step == 0) all = f;
        else {
          product(all, f, b);
          std::swap(all, b);
        }
        if (step == 4) break;
        product(a, f, b);
        product(b, f, a);
      }
      if (rows <= cols) gemm(N, N, cols, rows, rows, 1.f, x.data(), cols, all.data(), side, 0.f, y.data(), cols);
      else gemm(N, N, cols, rows, cols, 1.f, all.data(), side, x.data(), cols, 0.f, y.data(), cols);
      for (int64_t j = 0; j < size; j++) p[j] = keep * p[j] - move * y[j];
    }
  }
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("route", &route);
  m.def("sort_by_expert", &sort_by_expert);
  m.def("experts_forward", &experts_forward);
  m.def("experts_backward", &experts_backward);
  m.def("attention_forward", &attention_forward);
  m.def("attention_backward", &attention_backward);
  m.def("muon_step", &muon_step);
  m.def("norm_forward", &norm_forward);
  m.def("norm_backward", &norm_backward);
}
