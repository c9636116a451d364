// SwiGLU of rows.
#include "cpu/runtime.h"
#include "cpu/silu.h"

// gate_up, gate_up_stride, out, out_stride, rows, size
PEGA_KERNEL(pega_silu_and_mul) {
    const float* gate_up = pega::pointer<const float>(args[0]);
    float* out = pega::pointer<float>(args[2]);
    const int64_t stride = args[1], out_stride = args[3], size = args[5];
    constexpr int64_t piece = 512;  // columns
    const int64_t pieces = (size + piece - 1) / piece;
    ctx.parallel(args[4] * pieces, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t row = i / pieces, first = i % pieces * piece;
            const int64_t count = size - first < piece ? size - first : piece;
            const float* gate = gate_up + row * stride + first;
            pega::silu_and_mul(gate, gate + size, out + row * out_stride + first, count);
        }
    });
}
