/* Simulated annealing of a step over assignment and order, for best_known.py; see there.
 * place[i] = rank * K + slot, in and out. Returns the end of the best step found.
 * A rank's costs are those of its K slots on all stages but the last one, then those there. */
#include <stdlib.h>
#include <math.h>
#include <string.h>
#include <stdint.h>
#define MAXK 400
#define MAXP 32
static uint64_t S;
static inline uint32_t rnd(void){S^=S<<13;S^=S>>7;S^=S<<17;return (uint32_t)(S>>32);}
static inline int below(int n){return (int)(((uint64_t)rnd()*n)>>32);}
static inline double uni(void){return rnd()/4294967296.0;}
static double t1f1b(const double*c,int K,int P,double b){
  double clock[MAXP],ended[MAXP+1];int last=P-1;
  for(int s=0;s<=P;s++){if(s<P)clock[s]=0;ended[s]=0;}
  for(int n=0;n<K+last;n++){
    if(n<K){double r=0;for(int s=0;s<P;s++){double f=clock[s];r=(f>r?f:r)+c[s<last?n:K+n];clock[s]=r;}}
    int due=n-last,first=0;if(due<0){first=-due;due=0;}
    int end=first+K-due;if(end>P)end=P;
    for(int s=first;s<end;s++){double st=clock[s];if(s<last&&ended[s+1]>st)st=ended[s+1];st+=b*c[s<last?due:K+due];clock[s]=st;ended[s]=st;due++;}
  }
  return clock[0];
}
double anneal(int n,const double*cost,const double*lcost,const double*tok,double cap,int D,int P,int K,
  double b,double fixed,double lfixed,
  int*place,long moves,double t0,double t1,uint64_t seed){
  S=seed*2654435761u+88172645463325252ull;for(int i=0;i<10;i++)rnd();
  int M=D*K;double*c=malloc(2*M*8),*tk=calloc(M,8),*end=malloc(D*8);int*cnt=calloc(M,4),*mem=malloc((size_t)n*4),*pos=malloc(n*4),*best=malloc(n*4);
  /* The samples of each slot. */
  int **lst=malloc(M*sizeof(int*)),*capl=malloc(M*4);
  #define C(m) c[(m)+(m)/K*K]
  #define L(m) c[(m)+(m)/K*K+K]
  for(int m=0;m<M;m++){C(m)=fixed;L(m)=lfixed;capl[m]=8;lst[m]=malloc(8*4);}
  #define ADD(i,m) do{if(cnt[m]==capl[m]){capl[m]*=2;lst[m]=realloc(lst[m],capl[m]*4);}pos[i]=cnt[m];lst[m][cnt[m]++]=i;place[i]=m;}while(0)
  #define DEL(i) do{int m_=place[i];int l_=lst[m_][--cnt[m_]];lst[m_][pos[i]]=l_;pos[l_]=pos[i];}while(0)
  for(int i=0;i<n;i++){int m=place[i];C(m)+=cost[i];L(m)+=lcost[i];tk[m]+=tok[i];ADD(i,m);}
  double ref=0;for(int r=0;r<D;r++){end[r]=t1f1b(c+2*r*K,K,P,b);if(end[r]>ref)ref=end[r];}
  double bestE=ref;memcpy(best,place,n*4);
  double beta=300/ref;double sum=0;for(int r=0;r<D;r++)sum+=exp(beta*(end[r]-ref));
  double cur=log(sum)/beta;double na[2*MAXK],nb[2*MAXK];
  for(long it=0;it<moves;it++){
    double temp=ref*t0*pow(t1/t0,(double)it/moves);
    int ra,kind=below(10);
    if(below(3)==0){ra=0;for(int r=1;r<D;r++)if(end[r]>end[ra])ra=r;}else ra=below(D);
    int rb=below(2)?ra:below(D);
    int a,bb,i=-1,j=-1;
    if(kind<8){
      i=-1;a=ra*K+below(K);if(!cnt[a])continue;i=lst[a][below(cnt[a])];
      bb=rb*K+below(K);if(bb==a)continue;
      if(kind<4){ if(cnt[a]<2||tk[bb]+tok[i]>cap)continue; }
      else { if(!cnt[bb])continue;j=lst[bb][below(cnt[bb])];if(cost[i]==cost[j])continue;
        if(tk[bb]+tok[i]-tok[j]>cap||tk[a]-tok[i]+tok[j]>cap)continue;}
      double d=cost[i]-(j>=0?cost[j]:0),l=lcost[i]-(j>=0?lcost[j]:0);
      memcpy(na,c+2*ra*K,2*K*8);na[a-ra*K]-=d;na[a-ra*K+K]-=l;double ea,eb=0;
      if(rb==ra){na[bb-ra*K]+=d;na[bb-ra*K+K]+=l;ea=t1f1b(na,K,P,b);}
      else{memcpy(nb,c+2*rb*K,2*K*8);nb[bb-rb*K]+=d;nb[bb-rb*K+K]+=l;ea=t1f1b(na,K,P,b);eb=t1f1b(nb,K,P,b);}
      double ns=sum-exp(beta*(end[ra]-ref))+exp(beta*(ea-ref));
      if(rb!=ra)ns+=exp(beta*(eb-ref))-exp(beta*(end[rb]-ref));
      double ne=log(ns)/beta;
      if(ne>cur&&uni()>=exp((cur-ne)/temp))continue;
      C(a)-=d;C(bb)+=d;L(a)-=l;L(bb)+=l;tk[a]-=tok[i]-(j>=0?tok[j]:0);tk[bb]+=tok[i]-(j>=0?tok[j]:0);
      DEL(i);if(j>=0){DEL(j);ADD(j,a);}ADD(i,bb);
      end[ra]=ea;if(rb!=ra)end[rb]=eb;sum=ns;cur=ne;
    } else {
      int x=below(K),y=below(K);if(x==y)continue;
      int perm[MAXK];for(int k=0;k<K;k++)perm[k]=k;
      if(kind==8){perm[x]=y;perm[y]=x;}
      else{if(below(2)){y=x+1+below(3);if(y>=K)continue;}int t=perm[x];if(x<y){for(int k=x;k<y;k++)perm[k]=perm[k+1];}else for(int k=x;k>y;k--)perm[k]=perm[k-1];perm[y]=t;}
      for(int k=0;k<K;k++)na[k]=C(ra*K+perm[k]),na[K+k]=L(ra*K+perm[k]);
      double ea=t1f1b(na,K,P,b);double ns=sum-exp(beta*(end[ra]-ref))+exp(beta*(ea-ref));double ne=log(ns)/beta;
      if(ne>cur&&uni()>=exp((cur-ne)/temp))continue;
      int*ol[MAXK];double ot[MAXK];int oc[MAXK],op[MAXK];
      for(int k=0;k<K;k++){int m=ra*K+perm[k];ol[k]=lst[m];ot[k]=tk[m];oc[k]=cnt[m];op[k]=capl[m];}
      for(int k=0;k<K;k++){int m=ra*K+k;lst[m]=ol[k];tk[m]=ot[k];cnt[m]=oc[k];capl[m]=op[k];C(m)=na[k];L(m)=na[K+k];for(int q=0;q<oc[k];q++)place[lst[m][q]]=m;}
      end[ra]=ea;sum=ns;cur=ne;
    }
    double mx=0;for(int r=0;r<D;r++)if(end[r]>mx)mx=end[r];
    if(mx<bestE){bestE=mx;memcpy(best,place,n*4);}
    if((it&0xffff)==0){sum=0;for(int r=0;r<D;r++)sum+=exp(beta*(end[r]-ref));cur=log(sum)/beta;}
  }
  memcpy(place,best,n*4);
  for(int m=0;m<M;m++)free(lst[m]);free(lst);free(capl);free(c);free(tk);free(end);free(cnt);free(mem);free(pos);free(best);
  return bestE;
}
