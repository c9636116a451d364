// Rows by index.
#include "cpu/runtime.h"

// x, x_stride, indices, out, out_stride, rows of out, size, rows of x
PEGA_KERNEL(pega_gather_rows) {
    const float* x = pega::pointer<const float>(args[0]);
    const int32_t* indices = pega::pointer<const int32_t>(args[2]);
    float* out = pega::pointer<float>(args[3]);
    const int64_t x_stride = args[1], out_stride = args[4], size = args[6], limit = args[7];
    ctx.parallel(args[5], 8, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const int64_t index = indices[row];
            if (index < 0 || index >= limit) ctx.fail("gather_rows: an index is outside the rows of x");
            std::memcpy(out + row * out_stride, x + index * x_stride, sizeof(float) * size);
        }
    });
}
