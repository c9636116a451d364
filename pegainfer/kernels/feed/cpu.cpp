// Token ids ~i become the token of row i of the last sampling, in place; no token (-1) becomes 0.
#include <algorithm>

#include "cpu/runtime.h"

// token ids, number of them, sampled, number of rows
PEGA_KERNEL(pega_feed_tokens) {
    int32_t* token_ids = pega::pointer<int32_t>(args[0]);
    const int32_t* sampled = pega::pointer<const int32_t>(args[2]);
    const int64_t rows = args[3];
    ctx.parallel(args[1], 4096, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            if (token_ids[i] >= 0) continue;
            const int64_t row = ~token_ids[i];
            if (row >= rows) ctx.fail("feed_tokens: a token is outside of the last sampling");
            token_ids[i] = std::max(sampled[row], 0);
        }
    });
}
