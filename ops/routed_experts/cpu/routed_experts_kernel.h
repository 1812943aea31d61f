// The kernel of routed_experts. Included by for_each_isa.h, once in the namespace of each instruction set.

// out[t][n - start] = token[t] . w[n] for rows start to end of w and `count` tokens.
template <class W>
static void ExpertRows(
    const float* const* token, int64_t count, const W* w, int64_t in, int64_t start, int64_t end, float* const* out)
{
    for (int64_t n = start; n < end; n += kVectors) {
        const W* rows[kVectors];
        RowsAt(w, n, end, in, rows);
        PrefetchNext(rows, in);
        for (int64_t t = 0; t < count; t += kRows) {
            WithRows(std::min<int64_t>(kRows, count - t), [&](auto constant) {
                constexpr int kM = decltype(constant)::value;
                Vec acc[kM][kVectors] = {};
                Dots<kM, kVectors>(token + t, rows, in, acc);
                for (int i = 0; i < kVectors && n + i < end; ++i) {
                    for (int m = 0; m < kM; ++m) out[t + m][n + i - start] = Sum(acc[m][i]);
                }
            });
        }
    }
}

// `order` holds the pairs token * each + choice, those of one expert together.
template <class W>
static void RoutedExperts(const float* x, const int32_t* experts, const float* weights, const W* gate_up, const W* down,
    const std::vector<int64_t>& order, int64_t tokens, int64_t each, int64_t hidden, int64_t inner, int threads,
    float* y)
{
    static thread_local std::vector<float> inner_buffer, output_buffer;
    const int64_t pairs = tokens * each;
    float* inside = Scratch(&inner_buffer, pairs * inner);
    float* outputs = Scratch(&output_buffer, pairs * hidden);
    std::vector<std::pair<int64_t, int64_t>> groups;
    for (int64_t start = 0, end; start < pairs; start = end) {
        end = start + 1;
        while (end < pairs && experts[order[end]] == experts[order[start]]) ++end;
        groups.emplace_back(start, end - start);
    }
    constexpr int64_t kRange = 64;
    const int64_t inner_ranges = (inner + kRange - 1) / kRange, output_ranges = (hidden + kRange - 1) / kRange;
    const int64_t count = static_cast<int64_t>(groups.size());
#pragma omp parallel num_threads(threads)
    {
        std::vector<const float*> token;
        std::vector<float*> gate, out;
        std::vector<float> gates;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < count * inner_ranges; ++task) {
            const auto [first, size] = groups[task / inner_ranges];
            const int64_t start = task % inner_ranges * kRange, end = std::min(inner, start + kRange);
            const W* w = gate_up + experts[order[first]] * 2 * inner * hidden;
            token.resize(size), gate.resize(size), out.resize(size), gates.resize(size * kRange);
            for (int64_t i = 0; i < size; ++i) {
                token[i] = x + order[first + i] / each * hidden;
                gate[i] = gates.data() + i * kRange;
                out[i] = inside + order[first + i] * inner + start;
            }
            ExpertRows(token.data(), size, w, hidden, start, end, gate.data());
            ExpertRows(token.data(), size, w + inner * hidden, hidden, start, end, out.data());
            for (int64_t i = 0; i < size; ++i) {
                for (int64_t n = 0; n < end - start; ++n) out[i][n] *= gate[i][n] / (1.0f + std::exp(-gate[i][n]));
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < count * output_ranges; ++task) {
            const auto [first, size] = groups[task / output_ranges];
            const int64_t start = task % output_ranges * kRange, end = std::min(hidden, start + kRange);
            token.resize(size), out.resize(size);
            for (int64_t i = 0; i < size; ++i) {
                token[i] = inside + order[first + i] * inner;
                out[i] = outputs + order[first + i] * hidden + start;
            }
            ExpertRows(
                token.data(), size, down + experts[order[first]] * hidden * inner, inner, start, end, out.data());
        }
#pragma omp for
        for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t n = 0; n < hidden; ++n) {
                float sum = 0.0f;
                for (int64_t j = t * each; j < (t + 1) * each; ++j) sum += weights[j] * outputs[j * hidden + n];
                y[t * hidden + n] = sum;
            }
        }
    }
}
