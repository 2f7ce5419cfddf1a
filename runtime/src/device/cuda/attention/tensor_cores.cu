// Products of tiles of 16-bit elements on tensor cores (PTX ISA, mma.m16n8k16), and in software before sm_80.

const u32 STAGED = 0;
// The columns of score `c` and of result `c` of a lane.
DEVICE u32 column_of(u32 c) { return c / 2 * 8 + member() * 2 + c % 2; }
DEVICE u32 place_of(u32 c) { return column_of(c); }

// e^(s - shift).
DEVICE f32 power(f32 s, f32 shift) {
    const f32 log2e = 1.44269504088896340736f;
    return exp2f(m_fma(s, log2e, -shift * log2e));
}

// Two elements, the first in the low half.
DEVICE u32 pair(Element low, Element high) { return low.bits | (u32)high.bits << 16; }
DEVICE f32 half_of(u32 pair, u32 half) {
    Element element;
    element.bits = (u16)(pair >> 16 * half);
    return wide(element);
}

// Four matrices of 8 x 8 elements, two across and two down. A lane gets elements 2 t and 2 t + 1 of row g of each, or of
// column g if TURNED. ACROSS tells whether the second matrix is the one to the right, not the one below.
template <bool TURNED, bool ACROSS> DEVICE void fragments(u32 (&r)[4], const Element* tile, u32 line) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    // Lane l names row l % 8 of matrix l / 8.
    u32 l = threadIdx.x % 32, first = l / 8 % 2 * 8, second = l / 16 * 8;
    u64 address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(tile + (l % 8 + (ACROSS ? second : first)) * line + (ACROSS ? first : second)));
    if (TURNED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((u32)address) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((u32)address) : "memory");
    }
#else
    for (u32 m = 0; m < 4; m++) {
        u32 first = m % 2 * 8, second = m / 2 * 8;
        const Element* own = tile + (ACROSS ? second : first) * line + (ACROSS ? first : second);
        own += TURNED ? 2 * member() * line + group() : group() * line + 2 * member();
        r[m] = pair(own[0], own[TURNED ? line : 1]);
    }
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
DEVICE u32 narrow(f16, f32 low, f32 high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE u32 narrow(bf16, f32 low, f32 high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE void multiply_add(f16, f32* d, f32* e, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(e[0]), "+f"(e[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void multiply_add(bf16, f32* d, f32* e, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(e[0]), "+f"(e[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
DEVICE u32 narrow(Element, f32 low, f32 high) { return pair(stored(low), stored(high)); }
DEVICE void multiply_add(Element, f32* d, f32* e, const u32 (&a)[4], u32 b0, u32 b1) {
    for (u32 j = 0; j < 4; j++) {
        u32 own = group() * 4 + j, left = member() * 8 + j, right = left + 4;
        u32 upper[2] = {__shfl_sync(~0u, a[0], own), __shfl_sync(~0u, a[2], own)};
        u32 lower[2] = {__shfl_sync(~0u, a[1], own), __shfl_sync(~0u, a[3], own)};
        u32 before[2] = {__shfl_sync(~0u, b0, left), __shfl_sync(~0u, b1, left)};
        u32 after[2] = {__shfl_sync(~0u, b0, right), __shfl_sync(~0u, b1, right)};
        for (u32 k = 0; k < 4; k++) {
            f32 b[2] = {half_of(before[k / 2], k % 2), half_of(after[k / 2], k % 2)};
            for (u32 n = 0; n < 2; n++) {
                d[n] = m_fma(half_of(upper[k / 2], k % 2), b[n], d[n]);
                e[n] = m_fma(half_of(lower[k / 2], k % 2), b[n], e[n]);
            }
        }
    }
}
#endif

// sums += rows columnsᵀ, of 16 rows and COLUMNS columns that are stored as lines.
template <u32 CHUNK> DEVICE void add_scores(f32 (&sums)[2][SCORES], const Element* rows, const Element* columns) {
    const u32 line = CHUNK + VECTOR;
#pragma unroll
    for (u32 k = 0; k < CHUNK; k += 16) {
        u32 a[4];
        fragments<false, false>(a, rows + k, line);
#pragma unroll
        for (u32 n = 0; n < SCORES; n += 4) {
            u32 b[4];
            fragments<false, true>(b, columns + n * 4 * line + k, line);
            multiply_add(Element(), &sums[0][n], &sums[1][n], a, b[0], b[1]);
            multiply_add(Element(), &sums[0][n + 2], &sums[1][n + 2], a, b[2], b[3]);
        }
    }
}

// sums += weights lines, of 16 rows of weights and COLUMNS lines.
template <u32 CHUNK>
DEVICE void add_lines(f32 (&sums)[2][CHUNK / 4], const f32 (&weights)[2][SCORES], const Element* lines, f32*) {
    const u32 line = CHUNK + VECTOR;
#pragma unroll
    for (u32 k = 0; k < SCORES; k += 4) {
        u32 a[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const f32* own = &weights[i % 2][k + i / 2 * 2];
            a[i] = narrow(Element(), own[0], own[1]);
        }
#pragma unroll
        for (u32 n = 0; n < CHUNK / 4; n += 4) {
            u32 b[4];
            fragments<true, false>(b, lines + k * 4 * line + n * 4, line);
            multiply_add(Element(), &sums[0][n], &sums[1][n], a, b[0], b[1]);
            multiply_add(Element(), &sums[0][n + 2], &sums[1][n + 2], a, b[2], b[3]);
        }
    }
}
