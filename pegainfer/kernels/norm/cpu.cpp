// RMSNorm of rows.
#include "cpu/rms.h"
#include "cpu/runtime.h"

// x, x_stride, weight, out, out_stride, rows, size, eps
PEGA_KERNEL(pega_rms_norm) {
    const float* x = pega::pointer<const float>(args[0]);
    const float* weight = pega::pointer<const float>(args[2]);
    float* out = pega::pointer<float>(args[3]);
    const int64_t x_stride = args[1], out_stride = args[4], size = args[6];
    const float eps = static_cast<float>(pega::real(args[7]));
    ctx.parallel(args[5], 4, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            pega::rms_norm(x + row * x_stride, weight, out + row * out_stride, size, eps);
        }
    });
}
