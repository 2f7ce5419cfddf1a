// Of each query, by one warp: the product of result and gradient, and what the sum of its weights is divided by.
const at row = i / 32;
const u32 lane = threadIdx.x % 32;
Sum share = 0, norm = 1;
for (at c = lane; c < WIDTH; c += 32) share = m_fma((Sum)wide(dy[row * WIDTH + c]), (Sum)wide(y[row * WIDTH + c]), share);
const Sum size = m_fabs(log_sums[row]);
if (size > COARSE && size < -NEVER) {
    const Element *q_own = q + row * DEPTH, *k_own = k + row / (QUERIES * EACH) * KEYS * DEPTH;
    norm = 0;
    for (at key = lane; key < KEYS && (!IS_CAUSAL || key <= row % QUERIES); key += 32) {
        Sum s = 0;
        for (at c = 0; c < DEPTH; c++) s = m_fma((Sum)wide(q_own[c]), (Sum)wide(k_own[key * DEPTH + c]), s);
        norm += power(masked(s * SCALE, mask, mask_place(row), key), log_sums[row]);
    }
    norm = 1 / warp_sum(norm);
}
share = warp_sum(share);
if (lane == 0) {
    shares[row] = share;
    norms[row] = norm;
}
