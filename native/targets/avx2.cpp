#include "../vec/avx2.h"

#define HEADWISE_TARGET avx2
#include "../generic/target.h"
